"""Flags that a script adds to the parser of argparse: their words, errors and help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any


class ExtraArguments:
    """What a program's `extra_args_provider` added to the parser of argparse; its words are read by
    argparse, its errors said with all others. `own`: the names of the program's own flags.

    `words`: those that were given, by flag. Raises TypeError for what a command line of flags
    cannot have, ValueError for a name that the program has.
    """

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        own: Set[str],
        provider: Callable[[argparse.ArgumentParser], Any],
    ):
        self._parser = parser
        before = set(parser._actions)
        try:
            provider(self._parser)
        except argparse.ArgumentError as error:
            raise ValueError(
                f"extra_args_provider: {error}: {parser.prog} has it already; choose another "
                "spelling [extra-flag-taken]"
            ) from None
        actions = [action for action in parser._actions if action not in before]
        for action in actions:
            if not action.option_strings:
                raise TypeError(f"extra_args_provider: {action.dest}: only flags can be added")
            if action.dest in own:
                raise ValueError(
                    f"extra_args_provider: {action.option_strings[0]}: {action.dest} is a flag of "
                    f"{parser.prog} already; give it another dest [extra-flag-taken]"
                )
        self.by_spelling = {spelling: a for a in actions for spelling in a.option_strings}
        # argparse would judge these for each flag by itself
        self._required = [action for action in actions if action.required]
        self._groups = [
            (group, group.required) for group in self._parser._mutually_exclusive_groups
        ]
        for action in self._required:
            action.required = False
        for group in self._parser._mutually_exclusive_groups:
            group.required = False
        self.namespace = argparse.Namespace()
        self._parser.parse_known_args([], self.namespace)
        self._typed: list[argparse.Action] = []
        self.words: list[list[str]] = []
        # of the program's own flags, the defaults that the provider set
        self.defaults = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(self.namespace).items()
            if name in own
        }
        self._parser.set_defaults(**dict.fromkeys(self.defaults, argparse.SUPPRESS))  # of actions
        for name in self.defaults:
            del self._parser._defaults[name]
            delattr(self.namespace, name)

    def help(self, shows: Callable[..., bool] = lambda *texts: True) -> str:
        """These arguments in the groups they were added to, as argparse shows them: those of which
        `shows(spellings, help, title of the group)` is true."""
        formatter = argparse.HelpFormatter(self._parser.prog, max_help_position=34, width=110)
        own = set(self.by_spelling.values())
        for group in self._parser._action_groups:
            actions = [
                action
                for action in group._group_actions
                if action in own
                and shows(*action.option_strings, action.help or "", group.title or "")
            ]
            if actions:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        return formatter.format_help().rstrip()

    def take(self, words: Sequence[str]) -> str | None:
        """Read one flag with its words; what is wrong with them."""
        spelling = words[0].partition("=")[0]
        self._typed.append(self.by_spelling[spelling])
        self.words.append(list(words))
        try:
            unknown = self._parser.parse_known_args(list(words), self.namespace)[1]
        except argparse.ArgumentError as error:
            return f"{spelling}: {error.message} [value-malformed]"
        if unknown:
            return f"{spelling}: too many values: {' '.join(unknown)!r} [value-count-wrong]"
        return None

    def problems(self, broken: Collection[str]) -> list[str]:
        """What is wrong with all of them together: what is required and missing, and what excludes
        each other. `broken`: dests of those that were meant but could not be read."""
        problems = [
            f"{action.option_strings[0]} is missing: {action.help or 'it is required'} "
            "[flag-missing]"
            for action in self._required
            if action not in self._typed and action.dest not in broken
        ]
        for group, required in self._groups:
            names = [action.option_strings[0] for action in group._group_actions]
            typed = [a.option_strings[0] for a in group._group_actions if a in self._typed]
            if len(typed) > 1:
                problems.append(
                    f"{' and '.join(typed)}: only one of these can be given "
                    "[flags-exclude-each-other]"
                )
            if required and not typed:
                problems.append(f"one of {', '.join(names)} is missing: give it [flag-missing]")
        return problems
