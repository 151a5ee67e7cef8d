"""The command-line program.

This is the edge where strings name algorithms. Bad input and bad usage end in one line on standard error and exit
code 2. A command is loaded when it is called: most of them load torch, which takes seconds.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from riskfield import __version__
from riskfield.cli._common import USAGE_ERROR, complain, message_of, name_options
from riskfield.errors import RiskfieldError

# The first line of the help of each command, whose function and module have its name.
COMMANDS = {
    "infer": "Compute the marginals of a UAI model, or its best state.",
    "fit": "Fit a model that labels the pixels of images.",
    "run": "Fit the model that a Python file defines.",
    "predict": "Label the pixels of images.",
    "evaluate": "Compare predictions with masks.",
    "report": "Write an HTML report on one model, or on several side by side.",
}
_STYLE: dict[str, Any] = {
    "rich_markup_mode": None,  # help and errors as plain text: they go into pipes and logs as well
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _InputError(Exception):
    """What is wrong with the input, in terms of the command's options."""


class _Commands(TyperGroup):
    """Commands that are loaded when they are called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find the command, and load it."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _command(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Errors in its input name its options instead of arguments of Python functions."""
        try:
            return super().invoke(ctx)
        except (RiskfieldError, OSError, ValueError, MemoryError) as error:
            if isinstance(error, BrokenPipeError) or ctx.invoked_subcommand is None:
                raise
            raise _InputError(name_options(message_of(error), _command(ctx.invoked_subcommand))) from error


@cache
def _command(name: str) -> Any:
    alone = typer.Typer(add_completion=False, **_STYLE)
    alone.command(name)(getattr(import_module(f"riskfield.cli.{name}"), name))
    return typer.main.get_command(alone)


app = typer.Typer(name="riskfield", cls=_Commands, **_STYLE)


def main(arguments: list[str] | None = None) -> int:
    """Run the program on `arguments` (by default those of the process) and return its exit code."""
    try:
        code = app(arguments, prog_name="riskfield", standalone_mode=False) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has left. Python flushes once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except USAGE_ERROR as error:
        context = getattr(error, "ctx", None)
        return complain(f"{message_of(error)} Try '{context.command_path if context else 'riskfield'} --help'.", error)
    except _InputError as error:
        return complain(str(error), error.__cause__)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        hint = "This is a bug; RISKFIELD_TRACEBACK=1 in the environment shows where."
        complain(f"{type(error).__name__}: {message_of(error)} {hint}", error)
        return 1
    if code == 130:
        complain("interrupted.")
    return int(code)


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Inference and learning in factor graphs."""
    if version:
        typer.echo(f"riskfield {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def _not_loaded() -> None:
    """Stands for a command until it is called."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_not_loaded)
