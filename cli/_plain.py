"""Verbs in plain words: what typer would say of values, usage and mistakes in terms of Python's types.

`plain` gives a verb's parameters their words, `PlainCommand` prints them; typer itself parses.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from rollout_log.counting import several
from rollout_log.errors import RolloutLogError

__all__ = ["Misuse", "PlainCommand", "plain"]

_UsageError: Any = typer.BadParameter.__base__
"""click's, or the one of the click that is part of typer, as its version has it."""
_KINDS = {int: "a whole number", float: "a number"}


class Misuse(RolloutLogError):
    """A verb was called with what it does not take."""


def plain(run: Callable[..., Any]) -> Callable[..., Any]:
    """Give each parameter of a verb its plain word in the help, and numbers and choices plain errors."""
    hints = inspect.get_annotations(run, eval_str=True)
    for name, hint in hints.items():
        for about in getattr(hint, "__metadata__", ()):
            _describe(name, _bare(get_args(hint)[0]), about)
    run.__annotations__ = hints  # typer is to see what was changed, and not to make it anew from strings
    return run


def _bare(hint: Any) -> Any:
    """Return a type without its `| None`."""
    if get_origin(hint) in {Union, types.UnionType}:
        return next(part for part in get_args(hint) if part is not type(None))
    return hint


def _describe(name: str, kind: Any, about: Any) -> None:
    """Change a parameter, `about` being what `typer.Option` or `typer.Argument` gave."""
    word = name.upper()
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        word, about.parser = "|".join(choices), _choice(choices)
    elif kind in _KINDS and about.parser is None:
        word, about.parser = "N", _number(kind, about.min, about.max)
        about.min = about.max = None  # else the help has them as a formula
    about.metavar = about.metavar or word


def _choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _number(kind: Any, least: float | None, most: float | None) -> Callable[[Any], Any]:
    wanted = _KINDS[kind]
    if least is not None:
        wanted += f" of {least:g} or more" if most is None else f" from {least:g} to {most:g}"

    def parse(text: Any) -> Any:  # a default is a number already
        try:
            number = kind(text)
            within = (least is None or number >= least) and (most is None or number <= most)
        except ValueError:
            within = False
        if not within:
            raise typer.BadParameter(f"{str(text)!r} is not {wanted}")
        return number

    return parse


class PlainCommand(TyperCommand):
    """A verb. A call that it does not understand raises `Misuse`."""

    allow_extra_args = True  # so that `parse_args` can say it in its own words

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, *rest, **extra)
        except _UsageError as error:
            raise _misuse(error, info_name) from error

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=[*args])
        for each, times in Counter[Any](given).items():
            if times > 1 and each.nargs == 1 and not (each.multiple or each.is_flag or ctx.resilient_parsing):
                raise typer.BadParameter(f"given {times} times, and it takes one value", param=each)
        left = super().parse_args(ctx, args)
        if left and not ctx.resilient_parsing:
            raise _UsageError(f"{several(len(left), 'argument')} too many: {', '.join(map(repr, left))}")
        return left

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            raise _misuse(error, ctx.info_name) from error

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *map(_usage, self._arguments())]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        options = [each for each in self.get_params(ctx) if each.param_type_name == "option"]
        for title, parameters in (("Arguments", self._arguments()), ("Options", options)):
            if parameters:
                with formatter.section(title):
                    formatter.write_dl([(_head(each), " ".join(_help(each))) for each in parameters])

    def _arguments(self) -> list[Any]:
        found: list[Any] = [each for each in self.params if each.param_type_name == "argument"]
        return [each for each in found if not each.hidden]


def _misuse(error: Any, verb: str | None) -> Misuse:
    """Say what is wrong, with which argument or option, and where there is more."""
    if type(error) is typer.BadParameter:
        hint = error.param_hint or (max(_names(error.param), key=len) if error.param is not None else None)
        what = f"{hint}: {error.message}" if hint else error.message
    elif (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        near = ", ".join(error.possibilities or ())
        what = f"there is no option {option}" + (f", but {near}" if near else "")
    else:  # another subclass says it in a sentence
        said = error.format_message().rstrip(".")
        what = said[:1].lower() + said[1:]
    return Misuse(f"{what}; {verb} --help says more")


def _names(parameter: Any) -> list[str]:
    """Return the one name of an argument, or the names of an option, shortest first."""
    if parameter.param_type_name == "argument":
        return [parameter.metavar or parameter.name.upper()]
    return sorted(parameter.opts, key=len)


def _usage(argument: Any) -> str:
    (name,) = _names(argument)
    name += "…" * (argument.nargs != 1)
    return name if argument.required else f"[{name}]"


def _head(parameter: Any) -> str:
    names = ", ".join(_names(parameter))
    takes_value = parameter.param_type_name == "option" and not parameter.is_flag
    return f"{names} {parameter.metavar}" if takes_value else names


def _help(parameter: Any) -> Iterator[str]:
    yield parameter.help or ""
    if parameter.required:
        if parameter.param_type_name == "option":
            yield "[required]"
    elif parameter.default not in {None, False} and parameter.nargs == 1:
        yield f"[default: {parameter.default}]"
