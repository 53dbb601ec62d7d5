"""Makes the completion script for bash and zsh, from the parser and the settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from spotlight.config import Config, Section

SCRIPT = """\
# Completion of `spotlight`, for bash and zsh.
[ -z "${{ZSH_VERSION-}}" ] || {{ autoload -U +X compinit bashcompinit && compinit -u && bashcompinit; }}
_spotlight() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    [ "$word" != = ] || word=""  # bash takes "=" for a word of its own, zsh does not
    [ "$before" != = ] || before="${{COMP_WORDS[COMP_CWORD-2]}}"
    case "$COMP_CWORD:$before:${{COMP_WORDS[1]}}:$word" in
        1:*) words="{verbs} --help" ;;
        *:--set:*) words="{settings}"; compopt -o nospace 2> /dev/null ;;
{options}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _spotlight spotlight
"""
"""If none of these words fits, the shell completes file names."""


def script(parser: argparse.ArgumentParser) -> str:
    """The completion script, for ``eval`` in a shell."""
    (verbs,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    cases: dict[str, Iterable[str]] = {}
    for action in (action for verb in verbs.values() for action in verb._actions):
        cases |= {f"*:{option}:*": action.choices for option in action.option_strings if action.choices}
    cases |= {f"*:{name}:-*": _options(verb) for name, verb in verbs.items()}
    options = (f'        {pattern}) words="{" ".join(words)}" ;;' for pattern, words in cases.items())
    return SCRIPT.format(verbs=" ".join(verbs), settings=" ".join(_settings(Config)), options="\n".join(options))


def _options(verb: argparse.ArgumentParser) -> Iterator[str]:
    for action in verb._actions:
        yield from action.option_strings


def _settings(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """``section.key=`` of every setting."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}="
