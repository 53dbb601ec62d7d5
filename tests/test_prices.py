"""Price lists and files of prices: what is read, and how a bad line is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotlight.market.ledger import Price
from spotlight.market.prices import price_list, read_prices, usd_per_h
from spotlight.records import SpotlightError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "spot.csv"


def test_every_listed_price_has_a_source_and_a_date() -> None:
    listed = price_list()

    assert "h100" in listed
    assert all(set(each) == {"reserved", "spot", "source", "date"} for each in listed.values())
    assert all(0 < each["spot"] < each["reserved"] for each in listed.values())


def test_a_listed_price_depends_on_gpu_and_pool() -> None:
    # RLBoost: 8 GPUs at 83.79 and 2 at 5.32 dollars per hour.
    assert usd_per_h("h100", "reserved") == pytest.approx(83.79 / 8, abs=0.01)
    assert usd_per_h("h100", "spot") == pytest.approx(5.32 / 2)


def test_a_gpu_that_only_scores_costs_what_a_reserved_one_does() -> None:
    assert usd_per_h("h100", "reward") == usd_per_h("h100", "reserved")


def test_an_unlisted_gpu_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"pools\.spot\.gpu = 'h99'.*'h100'.*pools\.spot\.usd_per_h yourself"):
        usd_per_h("h99", "spot")


def test_times_are_calendar_times_or_unix_seconds(file: Path) -> None:
    file.write_text("time,usd_per_h\n1970-01-01T00:01:00Z,1.5\n1970-01-01 01:00:00+00:30, 2\n7200,0\n")

    assert read_prices(file) == Price(times_s=(60, 1800, 7200), usd_per_h=(1.5, 2.0, 0.0))


def test_a_time_without_a_zone_is_utc(file: Path) -> None:
    file.write_text("time,usd_per_h\n1970-01-02,1\n")

    assert read_prices(file).times_s == (24 * 3600,)


def test_comments_blank_lines_and_a_byte_order_mark_are_passed_over(file: Path) -> None:
    file.write_bytes("\ufeff# zone a\n\nsince_start_s,usd_per_h\n0,1\n# up\n60,2\n".encode())

    assert read_prices(file) == Price(times_s=(0, 60), usd_per_h=(1, 2), since_start=True)


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("", "", "the file is empty; its first line should be time,usd_per_h or since_start_s,usd_per_h"),
        ("when,price\n1,2\n", ":1", "'when,price' should be time,usd_per_h"),
        ("time,usd_per_h\n", "", "holds no price"),
        ("time,usd_per_h\n1,2\n2\n", ":3", "'2': has 1 fields; expected two"),
        ("time,usd_per_h\nsoon,2\n", ":2", "'soon' is no time; expected ISO 8601 or Unix seconds"),
        ("since_start_s,usd_per_h\n1970-01-01,2\n", ":2", "'1970-01-01' is no time; expected seconds"),
        ("time,usd_per_h\n1795824000000,2\n", ":2", "is after the year 33658; give seconds, not milliseconds"),
        ("time,usd_per_h\n1,free\n", ":2", "'free' is no price; expected US dollars per hour"),
        ("time,usd_per_h\n1,-2\n", ":2", "'-2' is no price"),
        ("time,usd_per_h\n1,nan\n", ":2", "'nan' is no price"),
        ("time,usd_per_h\n2,1\n\n2,3\n", ":4", "its time is not after the line before"),
    ],
)
def test_a_malformed_file_is_refused_with_line_and_reason(file: Path, text: str, where: str, why: str) -> None:
    file.write_text(text)

    with pytest.raises(SpotlightError) as refusal:
        read_prices(file)

    assert str(refusal.value).startswith(f"{file}{where}: ")
    assert why in str(refusal.value)


def test_a_missing_file_and_one_that_is_no_text_are_refused(file: Path) -> None:
    with pytest.raises(SpotlightError, match=r"spot\.csv: no such file of prices"):
        read_prices(file)

    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpotlightError, match=r"spot\.csv: cannot be read as a CSV file"):
        read_prices(file)
