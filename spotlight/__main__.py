"""Entry point of the command: imports the verbs, and ends quietly on Ctrl-C meanwhile."""

from __future__ import annotations

import sys

LEFT = 130
"""Exit status after Ctrl-C; see `spotlight.shell.EXIT`."""


def main() -> int:
    """Run the verb of the command line; returns the exit status."""
    try:
        from spotlight.shell import main as run_verb

        return run_verb()
    except KeyboardInterrupt:  # before a verb began, which handles it itself
        return LEFT


if __name__ == "__main__":
    sys.exit(main())
