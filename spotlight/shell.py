"""The shell's verbs: run, resume, submit, status, report, stop, cost, simulate, graph, export, sample, completion."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

from spotlight import __version__
from spotlight.clock import wall_clock
from spotlight.config import settings_named
from spotlight.files import is_url, writing
from spotlight.records import Policy, SpotlightError, Stopped, in_a_sentence
from spotlight.store.creating import create_run
from spotlight.store.rundir import RunDir

if TYPE_CHECKING:
    from spotlight.run import Run

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]
    Verb = Callable[[argparse.Namespace], None]


EXAMPLES = {
    "submit": (
        "submit a.toml --dry-run",
        "submit a.toml --begin 22:00 --set pools.spot.slurm.partition=spot",
        "submit runs/a",
    ),
    "run": (
        "run examples/ocr-tiny.toml --set run.iterations=5",
        "run a.toml --json > outcome.json",
        "run a.toml --into runs/a",
    ),
    "resume": (
        "resume runs/ocr-tiny-20261121-101500",
        "resume runs/ocr-tiny-20261121-101500 --iterations 60 --usd-max 200",
    ),
    "status": ("status runs/a", "status runs/a --json | jq .state"),
    "report": ("report runs/a",),
    "cost": ("cost runs/a", "cost runs/a --json | jq .usd"),
    "simulate": ("simulate examples/paced.toml", "simulate a.toml --alone --json --set pools.spot.workers=16"),
    "graph": ("graph examples/ocr-tiny.toml --to iteration.svg",),
    "export": ("export runs/a --to weights --version 30", "export runs/a --to transformer --merged"),
    "stop": ("stop runs/a",),
    "sample": ("sample runs/a --prompt cat --seeds 0 1 2 3 --to cat.png",),
    "completion": ("completion > ~/.spotlight-completion",),
}
"""Shown by each verb's ``--help``."""
RUN = "a run's directory, or its URL in an object store"
EXIT = """exit status:
  0    done
  1    something that you can put right; the message says how
  2    a command that does not exist, or is not complete
  70   an error in Spotlight itself; --debug shows where
  130  stopped, by Ctrl-C or a signal; `spotlight resume` goes on
  141  what reads its output has ended"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status, see `EXIT`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before Python began
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    parsed = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no "×" shows a question mark
    try:
        _check_directory()
        if parsed.verb in (_run, _resume, _submit, _simulate, _graph):
            _check_dask()
        parsed.verb(parsed)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # Rich raises the latter
        _print_no_more()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("spotlight: left at once", file=sys.stderr, flush=True)
        os._exit(130)  # the run's thread would keep this process until it is done; the workers end with it
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            _print_no_more()
            error = SpotlightError(f"what this command prints cannot be written ({error.strerror}): make room")
        if parsed.debug:
            traceback.print_exception(error)
        return _explain(error, told=parsed.debug)
    return 0


def _check_directory() -> None:
    """
    Raises:
        SpotlightError: the directory where we are is gone; no path below it has a name, and torch cannot be loaded.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise SpotlightError("the directory in which this command began is gone: change to another (`cd`)") from None


def _check_dask() -> None:
    """
    Raises:
        SpotlightError: a file of Dask's configuration cannot be read, and so Dask not be imported.
    """
    try:
        import dask.config  # noqa: F401
    except ValueError as error:
        raise SpotlightError(f"{' '.join(str(error).split())}: mend that file, or move it away") from None


def _print_no_more() -> None:
    """Send stdout to /dev/null: the interpreter flushes it again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: Exception, *, told: bool) -> int:
    """Say what happened in a sentence; returns the exit status."""
    match error:
        case SpotlightError():
            print(f"spotlight: {error}", file=sys.stderr)
            return 1
        case Stopped():
            print(f"spotlight: stopped; {error}", file=sys.stderr)
            return 130
    print(f"spotlight: {in_a_sentence(error)}", file=sys.stderr)
    if not told:
        print(f"spotlight: where it happened is in {_kept(error)}; --debug shows it at once", file=sys.stderr)
    return 70


def _kept(error: Exception) -> str:
    """Write an error's traceback to a file that only this user can read; returns its path."""
    with tempfile.NamedTemporaryFile("w", prefix="spotlight-error-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    return file.name


class _Parser(argparse.ArgumentParser):
    """Says how a setting is changed to whoever gave it as an option of its own."""

    def error(self, message: str) -> NoReturn:
        _, is_unknown, given = message.partition("unrecognized arguments: --")
        if is_unknown:
            name, _, value = given.replace("=", " ", 1).partition(" ")
            key = name.replace("-", "_")
            if name == "set":
                message += (
                    "; settings are given when a run begins (`spotlight run --set ...`), and stay: `spotlight resume` "
                    "takes --iterations, --target and --usd-max"
                )
            elif found := [each for each in settings_named(key.rpartition(".")[2]) if each.endswith(key)]:
                ways = " or ".join(f"--set {each}={value or '...'}" for each in found)
                message = f"{message}; a setting is changed by {ways}"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="spotlight",
        description="RL post-training of diffusion transformers.",
        epilog=f"{EXIT}\n\nspotlight VERB --help has examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"spotlight {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)

    run = _add_verb(verbs, "run", _run, "start a run")
    _add_settings(run)
    run.add_argument(
        "--into",
        metavar="RUN",
        help="the run directory, or its URL; resumes the run that is there, if there is one, so that the same "
        "command may be given again and again, as a queue of jobs does",
    )
    _add_cluster(run)
    _add_json(run, "show no progress, and print the final status as JSON")

    resume = _add_verb(verbs, "resume", _resume, "resume a run that was stopped or killed, or make it longer")
    resume.add_argument("run_dir", metavar="RUN", help=RUN)
    resume.add_argument(
        "--iterations", type=int, metavar="N", help="change the number of iterations in all, for a longer run"
    )
    resume.add_argument("--target", type=float, metavar="SCORE", help="change the score that ends the run (run.target)")
    resume.add_argument("--usd-max", type=float, metavar="USD", help="change what it may cost in all (run.usd_max)")
    _add_cluster(resume)
    _add_json(resume, "show no progress, and print the final status as JSON")

    submit = _add_verb(
        verbs,
        "submit",
        _submit,
        "start a run as a Slurm job, which starts its workers as jobs",
        "Makes a run directory and queues the run's driver as a batch job, which queues the workers of all pools.\n"
        "The driver stops before its time limit, is queued again, and resumes. Given an existing run, this queues its\n"
        "driver again.",
    )
    _add_settings(submit, "settings, a TOML file; or a run, whose driver is then submitted again")
    submit.add_argument("--dry-run", action="store_true", help="print the batch scripts, and do nothing")
    submit.add_argument("--begin", default="", metavar="TIME", help="earliest start, in sbatch's format, such as 22:00")

    status = _add_verb(verbs, "status", _status, "show the state of a run, whichever process runs it")
    status.add_argument("run_dir", metavar="RUN", help=RUN)
    _add_json(status)

    report = _add_verb(verbs, "report", _report, "write a run's report.html and pictures")
    report.add_argument("run_dir", metavar="RUN", help=RUN)

    stop = _add_verb(verbs, "stop", _stop, "stop a run of another process in order, after the steps in flight")
    stop.add_argument("run_dir", metavar="RUN", help=RUN)

    cost = _add_verb(verbs, "cost", _cost, "show where a run's seconds and dollars went")
    cost.add_argument("run_dir", metavar="RUN", help=RUN)
    _add_json(cost)

    simulate = _add_verb(
        verbs,
        "simulate",
        _simulate,
        "run settings, and strategies to compare them with, on a virtual clock: hours and dollars, before renting",
        "Runs a settings file, the same that `run` takes, on a virtual clock: the same loop, graphs and\n"
        "decisions on simulated machines. Each strategy leaves a run directory with its report.",
    )
    _add_settings(simulate)
    simulate.add_argument(
        "--learning",
        choices=("modelled", "real"),
        help="a model of learning, which is fast, or the model itself, trained in this process (as the settings say)",
    )
    simulate.add_argument("--alone", action="store_true", help="no comparison: only the settings as they are")
    simulate.add_argument("--no-report", action="store_true", help="write no report.html")
    _add_json(simulate, "print a line of JSON for each strategy")

    graph = _add_verb(verbs, "graph", _graph, "draw the Dask graph of one iteration")
    _add_settings(graph)
    graph.add_argument("--to", type=_local, default=Path("iteration.svg"), help="an .svg or .png file (%(default)s)")

    export = _add_verb(verbs, "export", _export, "write trained weights that plain diffusers loads")
    export.add_argument("run_dir", metavar="RUN", help=RUN)
    export.add_argument("--to", type=_local, required=True, help="directory to write")
    export.add_argument("--version", type=int, help="weights version (the latest)")
    export.add_argument("--policy", choices=get_args(Policy), help="which weights of it (those that were validated)")
    export.add_argument("--merged", action="store_true", help="the whole transformer, with the LoRA in its weights")

    sample = _add_verb(verbs, "sample", _sample, "draw a prompt with and without a run's training")
    sample.add_argument("run_dir", metavar="RUN", help=RUN)
    sample.add_argument("--prompt", required=True)
    sample.add_argument("--to", type=_local, default=Path("sample.png"), help="an image file (%(default)s)")
    sample.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="one column each (0 1 2 3)")
    sample.add_argument("--steps", type=int, default=0, help="denoising steps (as a validation)")
    sample.add_argument("--version", type=int, help="weights version (the latest)")

    _add_verb(
        verbs,
        "completion",
        _completion,
        "print a completion script for bash or zsh",
        "Prints a script with which bash or zsh completes verbs, options and settings. In ~/.bashrc or ~/.zshrc:\n\n"
        '  eval "$(spotlight completion)"',
    )
    return parser


def _add_verb(verbs: Verbs, name: str, verb: Verb, summary: str, description: str = "") -> argparse.ArgumentParser:
    examples = "\n".join(f"  spotlight {example}" for example in EXAMPLES[name])
    parser = verbs.add_parser(
        name,
        help=summary,
        description=description or f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"for example:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    parser.set_defaults(verb=verb)
    return parser


def _add_json(parser: argparse.ArgumentParser, what: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=what)


def _local(path: str) -> Path:
    if "://" in path:
        raise argparse.ArgumentTypeError(f"{path!r} is a URL: give a local path, and copy what is written there")
    return Path(path)


def _add_settings(parser: argparse.ArgumentParser, what: str = "settings, a TOML file; see examples/") -> None:
    parser.add_argument("config", help=what)
    _add_overrides(parser, "run.seed=3")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="run on the Dask cluster with this scheduler address, such as tls://head:8786, or this scheduler file; "
        "without it, on processes of this machine; see docs/clusters.md",
    )


def _add_overrides(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help=f"change one setting, such as {example}; may be repeated",
    )


def _run(parsed: argparse.Namespace) -> None:
    from spotlight.run import Run

    if parsed.into is not None:
        _follow(Run.into(parsed.into, parsed.config, parsed.overrides, cluster=parsed.cluster), parsed)
    else:
        _follow(Run(parsed.config, parsed.overrides, cluster=parsed.cluster), parsed)


def _resume(parsed: argparse.Namespace) -> None:
    from spotlight.run import Run

    if (directory := RunDir.open(parsed.run_dir)).config().cluster.manager == "slurm":
        from cluster.start.slurm_driver import refuse_second

        refuse_second(directory)
    ends = {"iterations": parsed.iterations, "target": parsed.target, "usd_max": parsed.usd_max}
    run = Run.resume(parsed.run_dir, cluster=parsed.cluster, **ends)
    was_over = run.state == "finished"
    _follow(run, parsed)
    if was_over and not parsed.json:
        print(f"the run was over: {_how_to_go_on(run.directory, run.resume_command)}")


def _how_to_go_on(run: RunDir, command: str) -> str:
    """Of a run that is over: why it is, and how the command that resumes it makes it longer."""
    from spotlight.store import resuming

    if why := resuming.ended_early(run):
        option = "--target SCORE" if resuming.reached(run, run.config()) else "--usd-max USD"
        return f"{why}; `{command} {option}` ends it later"
    done = len(run.history())
    return f"all {done} iterations are done; `{command} --iterations {2 * done}` makes it twice as long"


def _follow(run: Run, parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from spotlight.display import follow

    if not parsed.json:
        try:
            follow(run)
        except (BrokenPipeError, SystemExit):
            how = run.resume_command
            print(f"spotlight: stopped, for nobody reads what it prints any more; {how} goes on", file=sys.stderr)
            raise
        return
    try:
        follow(run, Console(file=io.StringIO(), markup=False))
    finally:
        if run.state != "new":
            print(json.dumps(asdict(run.status)))


def _status(parsed: argparse.Namespace) -> None:

    from spotlight.display import status_table, terminal
    from spotlight.run import Run

    run = Run.attach(parsed.run_dir)
    status = run.status
    if status.state in ("new", "stopped", "failed") and (run.directory.path / "slurm").exists():
        from cluster.start.slurm_driver import told_of

        told = told_of(run.directory, only_queued=status.state != "new")
        status = replace(status, error="; ".join(filter(None, (status.error, told))))
    if parsed.json:
        print(json.dumps(asdict(status)))
    else:
        terminal().print(status_table(status))
        if status.state in ("stopped", "failed") and not run.directory.simulated:
            print(f"`{run.resume_command}` goes on")


def _stop(parsed: argparse.Namespace) -> None:
    from spotlight.run import Run

    run = Run.attach(parsed.run_dir)
    on_slurm = run.config.cluster.manager == "slurm"
    if not run.alive:
        from cluster.start.slurm_driver import cancel_left

        cancelled = cancel_left(run.directory, run.config) if on_slurm else []
        if cancelled is None:
            raise SpotlightError(
                f"{run.directory.url}: nobody is running this run here, and Slurm does not answer: `squeue --me` shows "
                "what it still has of it, once it does"
            )
        if not cancelled:
            raise SpotlightError(f"{run.directory.url}: nobody is running this run")
        print(f"nobody is running this run; cancelled what Slurm had of it: {', '.join(cancelled)}")
        return
    from cluster.start.slurm_driver import stop_job

    resume = run.resume_command  # as long as its driver says where it runs
    if not (on_slurm and stop_job(run.directory)):
        run.stop()
    print(f"it ends after the steps in flight; `{resume}` goes on")


def _submit(parsed: argparse.Namespace) -> None:
    from cluster.start.slurm import check_commands
    from cluster.start.slurm_driver import check_jobs, check_time, scripts
    from spotlight import config
    from spotlight.inputs import check_inputs
    from spotlight.report import tracking

    if is_url(parsed.config) or Path(parsed.config).is_dir():
        _submit_again(parsed)
        return
    settings = config.load(parsed.config, [*parsed.overrides, 'cluster.manager="slurm"'])
    if "dashboard_port" not in settings.cluster.model_fields_set:  # nobody knows which are free where it will run
        settings = config.load(
            parsed.config, [*parsed.overrides, 'cluster.manager="slurm"', "cluster.dashboard_port=0"]
        )
    check_inputs(settings)
    tracking.check(settings)
    check_time(settings)
    planned = f"{settings.run.dir}/{settings.run.name}"
    if parsed.dry_run:
        _show(scripts(settings, planned, begin=parsed.begin))
        return
    check_commands()
    check_jobs(settings, planned)
    run = create_run(settings, wall_clock())
    try:
        _queue_driver(run, scripts(settings, run.url, begin=parsed.begin))
    except SpotlightError:
        if not is_url(run.url):
            shutil.rmtree(run.path)  # nobody has begun it
        raise


def _submit_again(parsed: argparse.Namespace) -> None:
    """Queue the driver of an existing run."""
    from cluster.start.slurm import check_commands
    from cluster.start.slurm_driver import check_jobs, refuse_second, scripts
    from spotlight.inputs import check_inputs
    from spotlight.store import resuming

    if parsed.overrides:
        raise SpotlightError(f"{parsed.config} is a run, whose settings stay as they are: leave --set out")
    run = RunDir.open(parsed.config)
    resuming.check(run)
    settings = run.config()
    if settings.cluster.manager != "slurm":
        raise SpotlightError(
            f'{run.url}: its workers are no jobs of Slurm (cluster.manager = "{settings.cluster.manager}"), and so its '
            f"driver cannot be one: `{run.resume_command}` goes on with it"
        )
    if holder := run.holder():
        raise SpotlightError(f"{run.url}: {holder} is running this run: wait for it, or stop it first")
    if resuming.is_over(run, settings):
        raise SpotlightError(f"{run.url}: the run is over: {_how_to_go_on(run, run.resume_command)}")
    check_inputs(settings, begun=resuming.has_begun(run.url))
    found = scripts(settings, run.url, begin=parsed.begin)
    if parsed.dry_run:
        _show(found)
        return
    check_commands()
    refuse_second(run)
    check_jobs(settings, run.url)
    _queue_driver(run, found)


def _show(scripts: Mapping[str, str]) -> None:
    for what, script in scripts.items():
        print(f"# --- {what} ---\n{script}")


def _queue_driver(run: RunDir, scripts: Mapping[str, str]) -> None:
    from cluster.start.slurm_driver import record, submit

    (run.path / "slurm").mkdir(exist_ok=True)
    job = submit(scripts["the driver"])
    record(run, job)
    print(f"job {job}\nrun directory   {run.url}\noutput          {run.path}/slurm/driver-{job}.out")


def _report(parsed: argparse.Namespace) -> None:
    RunDir.open(parsed.run_dir)  # before the imports, which take seconds
    from spotlight.report import write_report

    with writing(parsed.run_dir):
        report = write_report(parsed.run_dir)
    print(report)


def _cost(parsed: argparse.Namespace) -> None:

    from spotlight.display import terminal
    from spotlight.report.money import bought, cost_json, cost_table, emulated
    from spotlight.store.accounts import Accounts

    run = RunDir.open(parsed.run_dir)
    settings = run.config()
    is_watched = bool(run.holder())
    accounts = Accounts(run, settings, watched=is_watched)
    if not is_watched:
        accounts.check()
    ledger = accounts.ledger(accounts.until_s(wall_clock()))
    if not ledger.entries:
        raise SpotlightError(f"{run.url}: no finished task is recorded yet, so there is no account: try again later")
    if parsed.json:
        labels = {
            "paced": settings.pace.gpu,
            "simulated": run.simulated,
            "emulated_per_real_s": settings.emulated_per_real_s,
        }
        print(json.dumps(labels | cost_json(ledger), indent=1))
        return
    console = terminal()
    so_far = "" if run.summary() else ", as far as it is recorded"
    label = emulated(settings, run.simulated)
    title = f"{run.name}{f' ({label})' if label else ''}{so_far}"
    console.print(cost_table(ledger, title, width=console.width))
    for name, value in bought(ledger):
        console.print(f"{name:<52}{value}", soft_wrap=True, highlight=False)


def _simulate(parsed: argparse.Namespace) -> None:
    from spotlight.display import follow_simulation
    from spotlight.simulation import simulate

    given = {"learning": parsed.learning, "compare": not parsed.alone, "report": not parsed.no_report}
    if not parsed.json:
        follow_simulation(lambda follow: simulate(parsed.config, parsed.overrides, **given, follow=follow))
        return
    for outcome in simulate(parsed.config, parsed.overrides, **given):
        row = {field.name: getattr(outcome, field.name) for field in fields(outcome) if field.name != "ledger"}
        print(json.dumps({**row, "run_dir": str(outcome.run_dir)}), flush=True)


def _graph(parsed: argparse.Namespace) -> None:
    from graphs.iteration import example_graph
    from spotlight import config
    from spotlight.report.iteration_figure import draw

    graph = example_graph(config.load(parsed.config, parsed.overrides)).graph
    with writing(parsed.to):
        draw(graph, parsed.to)
    print(parsed.to)


def _export(parsed: argparse.Namespace) -> None:
    RunDir.open(parsed.run_dir)
    from spotlight.rl.export import export_weights

    with writing(parsed.to):
        exported = export_weights(parsed.run_dir, parsed.to, parsed.version, parsed.policy, merged=parsed.merged)
    print(exported)


def _sample(parsed: argparse.Namespace) -> None:
    RunDir.open(parsed.run_dir)
    from spotlight.rl.sample import sample

    options = {"seeds": parsed.seeds, "steps": parsed.steps, "version": parsed.version}
    with writing(parsed.to):
        drawn = sample(parsed.run_dir, parsed.prompt, parsed.to, **options)
    print(drawn)


def _completion(parsed: argparse.Namespace) -> None:
    from spotlight.completion import script

    print(script(_parser()), end="")
