"""Claims about prompt files and about which prompts an iteration gets."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.records import Prompt, SpotlightError
from spotlight.rl.prompts import all_chosen, check_prompts, choose_prompts, read_prompts
from spotlight.rl.rewards import load, quoted_target

EXAMPLES = Path(__file__).parents[1] / "examples" / "prompts"


def test_prompts_are_read_one_a_line_without_a_final_newline(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes('a sign "1"\r\n\n  \nein Schild "Übung"'.encode())

    prompts = read_prompts(file)

    assert prompts == (Prompt(id=0, text='a sign "1"'), Prompt(id=3, text='ein Schild "Übung"'))


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('a sign "1"', encoding="utf-8-sig")

    (prompt,) = read_prompts(file)

    assert prompt.text == 'a sign "1"'


def test_the_published_prompt_file_is_read_whole(shared_data: Path) -> None:
    path = shared_data / "ocr_prompts_test.txt"

    prompts = read_prompts(path)

    check_prompts(prompts, path, load("ocr").check_prompt)
    assert len(prompts) == 1018  # as its source counts them; it has no final newline


def test_the_published_geneval_file_is_read_whole_with_its_metadata(shared_data: Path) -> None:
    prompts = read_prompts(shared_data / "geneval_evaluation_metadata.jsonl")

    assert len(prompts) == 553
    assert prompts[0].text == "a photo of a bench"
    assert json.loads(prompts[0].metadata) == {"tag": "single_object", "include": [{"class": "bench", "count": 1}]}


def test_rows_of_json_and_of_tables_are_prompts_with_metadata(tmp_path: Path) -> None:
    rows = tmp_path / "p.jsonl"
    rows.write_text('{"prompt": "a dog", "n": 1}\n\n"a cat"\n')
    table = tmp_path / "p.csv"
    table.write_text('caption,tag\n"a ""dog"", running",x\na cat,\n')

    assert read_prompts(rows) == (Prompt(id=0, text="a dog", metadata='{"n": 1}'), Prompt(id=2, text="a cat"))
    assert [(each.text, json.loads(each.metadata)) for each in read_prompts(table)] == [
        ('a "dog", running', {"tag": "x"}),
        ("a cat", {"tag": ""}),
    ]


def test_metadata_are_the_same_whatever_the_order_of_a_rows_columns_and_without_those_that_are_null(
    tmp_path: Path,
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"tag": "x", "prompt": "a", "n": 1}\n{"n": 1, "prompt": "a", "tag": "x"}\n{"prompt": "a", "tag": null}\n'
    )

    assert [each.metadata for each in read_prompts(file)] == ['{"n": 1, "tag": "x"}'] * 2 + [""]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{', r"p\.jsonl:2: not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "\\ud83d"}', r"p\.jsonl:2: text that is not Unicode"),
        ("p.jsonl", '{"prompt": "a", "tag": "\\ud83d"}', r"p\.jsonl:1: text that is not Unicode"),
        ("p.csv", 'prompt\na\n"b' + "c" * 140_000, r"p\.csv:3: not CSV: .*quotation mark"),
        ("p.csv", 'prompt\na\n"b\nc\n', r"p\.csv:3: not CSV"),
        ("p.tsv", 'prompt\n"47" on a sign\n', r"p\.tsv:2: not CSV"),
        ("p.jsonl", "[1]", r"p\.jsonl:1: a JSON object is expected"),
        ("p.jsonl", '{"prompt": ""}', r"p\.jsonl:1: no prompt: .* there is prompt"),
        ("p.csv", "a,b\n1,2\n", r"p\.csv:2: no prompt: .* there is a, b"),
        ("p.csv", "", "the file is empty"),
        ("p.csv", "prompt\na cat, on a mat\n", r"p\.csv:2: 2 cells for 1 columns: put quotation marks"),
        ("p.csv", "prompt,tag,tag\na,b,c\n", r"p\.csv:1: the column 'tag' is there twice"),
        ("p.CSV", 'a,b\n\n"1\n2",2\n', r"p\.CSV:4: no prompt: .* there is a, b"),
        ("p.jsonl", '{"prompt": "a", "n": NaN}', r"p\.jsonl:1: metadata that is no JSON"),
    ],
)
def test_a_row_without_a_prompt_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(SpotlightError, match=message):
        read_prompts(tmp_path / name)


def test_the_kind_of_a_file_is_told_by_its_ending_whatever_its_case(tmp_path: Path) -> None:
    table, rows = tmp_path / "p.TSV", tmp_path / "p.JSONL"
    table.write_text("prompt\ttag\na cat, on a mat\tx\n")
    rows.write_text('{"prompt": "a dog"}\n')

    assert read_prompts(table) == (Prompt(id=0, text="a cat, on a mat", metadata='{"tag": "x"}'),)
    assert read_prompts(rows) == (Prompt(id=0, text="a dog"),)


def test_parquet_is_read_where_pyarrow_is_and_else_named(tmp_path: Path) -> None:
    file = tmp_path / "p.parquet"
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        with pytest.raises(SpotlightError, match="needs pyarrow"):
            read_prompts(file)
        return
    parquet.write_table(pyarrow.table({"prompt": ["a dog", "a cat"], "n": [1, 2]}), file)

    assert read_prompts(file)[1] == Prompt(id=1, text="a cat", metadata='{"n": 2}')


def test_a_saved_data_set_is_read_where_datasets_is_and_else_named(tmp_path: Path) -> None:
    try:
        import datasets
    except ImportError:
        with pytest.raises(SpotlightError, match="needs the package datasets"):
            read_prompts(tmp_path)
        return
    datasets.Dataset.from_dict({"prompt": ["a dog", "a cat"], "n": [1, 2]}).save_to_disk(str(tmp_path / "set"))

    assert read_prompts(tmp_path / "set")[1] == Prompt(id=1, text="a cat", metadata='{"n": 2}')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b'a "1"\nb "2"\nc "\xff"', r"prompts\.txt:3: byte 0xff is not UTF-8"),
    ],
)
def test_a_useless_prompt_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)

    with pytest.raises(SpotlightError, match=message):
        read_prompts(file)


def test_a_missing_prompt_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "absent.txt"

    with pytest.raises(SpotlightError, match=r"absent\.txt: .*No such file"):
        read_prompts(file)


def test_a_prompt_without_a_target_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('a sign "1"\n\na sign without digits\n')
    prompts = read_prompts(file)

    with pytest.raises(SpotlightError, match=r"prompts\.txt:3: .*'a sign without digits'"):
        check_prompts(prompts, file, load("ocr").check_prompt)


@given(
    available=st.integers(1, 40),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 5),
)
def test_an_epoch_repeats_no_prompt(available: int, share: float, seed: int, epoch: int) -> None:
    per_iteration = max(1, round(share * available))
    iterations = available // per_iteration

    chosen = [
        index
        for iteration in range(epoch * iterations, (epoch + 1) * iterations)
        for index in choose_prompts(available, per_iteration, seed=seed, iteration=iteration)
    ]

    assert len(chosen) == iterations * per_iteration
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(range(available))


@given(available=st.integers(1, 40), share=st.floats(0, 1), seed=st.integers(0, 2**32), iterations=st.integers(1, 30))
def test_all_that_is_chosen_is_known_before(available: int, share: float, seed: int, iterations: int) -> None:
    per_iteration = max(1, round(share * available))

    found = all_chosen(available, per_iteration, seed=seed, iterations=iterations)

    chosen = {
        index
        for iteration in range(iterations)
        for index in choose_prompts(available, per_iteration, seed=seed, iteration=iteration)
    }
    few_are_left = len(chosen) > available - per_iteration
    assert found == (list(range(available)) if few_are_left else sorted(chosen))


def test_the_choice_depends_on_seed_and_iteration_alone() -> None:
    first = choose_prompts(80, 8, seed=3, iteration=12)

    again = choose_prompts(80, 8, seed=3, iteration=12)

    assert again == first
    assert choose_prompts(80, 8, seed=4, iteration=12) != first
    assert choose_prompts(80, 8, seed=3, iteration=12 + 10) != first  # the same place in the next epoch


def test_a_run_that_an_earlier_release_began_is_resumed_with_the_prompts_that_it_chose() -> None:
    """Written down on 2026-11-29: whoever draws otherwise breaks runs that are under way."""
    assert choose_prompts(8, 4, seed=1, iteration=0) == (0, 5, 4, 1)
    assert choose_prompts(8, 4, seed=1, iteration=5) == (6, 2, 3, 1)


def test_too_few_prompts_for_an_iteration_is_an_error_with_both_numbers() -> None:
    with pytest.raises(SpotlightError, match=r"9 prompts .* 8 prompts"):
        choose_prompts(8, 9, seed=0, iteration=0)


def test_the_examples_split_the_two_digit_numbers() -> None:
    train = [quoted_target(prompt.text) for prompt in read_prompts(EXAMPLES / "digits-train.txt")]

    validation = [quoted_target(prompt.text) for prompt in read_prompts(EXAMPLES / "digits-validation.txt")]

    assert sorted(train + validation) == [f"{number:02d}" for number in range(100)]
    assert (len(train), len(validation)) == (80, 20)


@pytest.mark.parametrize("files", ["digits", "numbers"])
def test_the_examples_are_what_their_script_makes(files: str) -> None:
    script = runpy.run_path(str(EXAMPLES / "make_prompts.py"))

    train, validation = script["make_prompts"](*script["HELD_OUT"][files])

    assert train == [prompt.text for prompt in read_prompts(EXAMPLES / f"{files}-train.txt")]
    assert validation == [prompt.text for prompt in read_prompts(EXAMPLES / f"{files}-validation.txt")]


def test_the_mixed_examples_hold_out_four_texts_of_every_kind() -> None:
    script = runpy.run_path(str(EXAMPLES / "make_prompts.py"))

    train, validation = script["make_mixed"]()

    for name, prompts in (("train", train), ("validation", validation)):
        assert prompts == [prompt.text for prompt in read_prompts(EXAMPLES / f"mixed-{name}.txt")]
    kinds = Counter((len(text), script["_kind"](text)) for text in map(quoted_target, validation))
    assert set(kinds.values()) == {4}
    assert len(kinds) == 11  # a single character is not mixed
    assert not {*map(quoted_target, train)} & {*map(quoted_target, validation)}
