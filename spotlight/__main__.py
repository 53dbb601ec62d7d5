"""The shell's verbs: run, resume, report, cost, simulate, graph, export."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from spotlight.clock import wall_clock
from spotlight.records import Policy, SpotlightError, Stopped
from spotlight.store.rundir import SUMMARY, RunDir


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 for what a person can put right, 130 when stopped."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.verb(parsed)
    except SpotlightError as error:
        print(f"spotlight: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"spotlight: stopped; {stopped}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("spotlight: left at once", file=sys.stderr, flush=True)
        os._exit(130)  # the run's thread would keep this process until it is done; the workers end with it
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spotlight", description="RL post-training of diffusion transformers.")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    run = verbs.add_parser("run", help="start a run")
    _add_settings(run)
    _add_cluster(run)
    run.set_defaults(verb=_run)

    resume = verbs.add_parser("resume", help="go on with a run that was stopped or killed")
    resume.add_argument("run_dir", type=Path)
    _add_cluster(resume)
    resume.set_defaults(verb=_resume)

    report = verbs.add_parser("report", help="write a run's report.html and pictures")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(verb=_report)

    cost = verbs.add_parser("cost", help="say where a run's seconds and dollars went")
    cost.add_argument("run_dir", type=Path)
    cost.add_argument("--json", action="store_true", help="for machines")
    cost.set_defaults(verb=_cost)

    simulate = verbs.add_parser(
        "simulate",
        help="run settings on a virtual clock, and what they are to be compared with: time and dollars, before renting",
        description="Runs a settings file, the very one that `run` takes, on a virtual clock: the same loop, graphs "
        "and decisions on machines that are not there. Each strategy leaves a run directory with its report.",
    )
    _add_settings(simulate)
    simulate.add_argument(
        "--learning",
        choices=("modelled", "real"),
        help="a model of learning, fast (the settings say so by default), or the model itself, trained in this process",
    )
    simulate.add_argument("--alone", action="store_true", help="no comparison: only the settings as they are")
    simulate.add_argument("--no-report", action="store_true", help="write no report.html")
    simulate.set_defaults(verb=_simulate)

    graph = verbs.add_parser("graph", help="draw the Dask graph of one iteration")
    _add_settings(graph)
    graph.add_argument("--to", type=Path, default=Path("iteration.svg"), help="an .svg or .png file (%(default)s)")
    graph.set_defaults(verb=_graph)

    export = verbs.add_parser("export", help="write trained weights that plain diffusers loads")
    export.add_argument("run_dir", type=Path)
    export.add_argument("--to", type=Path, required=True, help="directory to write")
    export.add_argument("--version", type=int, help="weights version (the latest)")
    export.add_argument("--policy", choices=get_args(Policy), help="which of its weights (those that were validated)")
    export.set_defaults(verb=_export)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="settings, a TOML file; see examples/")
    _add_overrides(parser, "run.seed=3")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="run on the Dask cluster whose scheduler is there, such as tls://head:8786, or whose scheduler file this "
        "is; without it, on processes of this machine; see docs/clusters.md",
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
    from spotlight.display import follow
    from spotlight.run import Run

    follow(Run(parsed.config, parsed.overrides, cluster=parsed.cluster))


def _resume(parsed: argparse.Namespace) -> None:
    from spotlight.display import follow
    from spotlight.run import Run

    follow(Run.resume(parsed.run_dir, cluster=parsed.cluster))


def _report(parsed: argparse.Namespace) -> None:
    RunDir.open(parsed.run_dir)  # before the imports, which take seconds
    from spotlight.report import write_report

    with _writing(parsed.run_dir):
        print(write_report(parsed.run_dir))


def _cost(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from spotlight.report.money import bought, cost_json, cost_table, simulation
    from spotlight.store.accounts import Accounts

    run = RunDir.open(parsed.run_dir)
    settings = run.config()
    ledger = Accounts(run, settings).ledger(wall_clock())
    if not ledger.entries:
        raise SpotlightError(f"{run.path}: no finished task is recorded yet, so there is no account: try again later")
    if parsed.json:
        labels = {"paced": settings.pace.gpu, "simulated": run.simulated}
        print(json.dumps(labels | cost_json(ledger), indent=1))
        return
    console = Console()
    so_far = "" if (run.path / SUMMARY).exists() else ", as far as it is recorded"
    paced = f" (PACED: {settings.pace.model} on {settings.pace.gpu} is emulated)" if settings.pace.gpu else ""
    simulated = f" ({simulation(run.simulated)})" if run.simulated else ""
    console.print(cost_table(ledger, f"{run.path.name}{simulated}{paced}{so_far}"))
    for name, value in bought(ledger):
        console.print(f"{name:<52}{value}", soft_wrap=True, highlight=False)


def _simulate(parsed: argparse.Namespace) -> None:
    from spotlight.display import follow_simulation
    from spotlight.simulation import simulate

    follow_simulation(
        lambda follow: simulate(
            parsed.config,
            parsed.overrides,
            learning=parsed.learning,
            compare=not parsed.alone,
            report=not parsed.no_report,
            follow=follow,
        )
    )


def _graph(parsed: argparse.Namespace) -> None:
    from graphs.iteration import example_graph
    from spotlight import config
    from spotlight.report.iteration_figure import draw

    graph = example_graph(config.load(parsed.config, parsed.overrides)).graph
    with _writing(parsed.to):
        draw(graph, parsed.to)
    print(parsed.to)


def _export(parsed: argparse.Namespace) -> None:
    RunDir.open(parsed.run_dir)
    from spotlight.rl.export import export_lora

    with _writing(parsed.to):
        print(export_lora(parsed.run_dir, parsed.to, parsed.version, parsed.policy))


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A place that cannot be written to, or is full, is for a person to put right."""
    try:
        yield
    except OSError as error:
        raise SpotlightError(f"{path}: cannot be written: {error}; make room, or choose another place") from error


if __name__ == "__main__":
    sys.exit(main())
