"""The command-line program.

This is the edge where strings name algorithms. Bad input and bad usage end in one line on standard error and exit
code 2.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from riskfield import __version__
from riskfield.cli import evaluate, fit, infer, predict, report, run
from riskfield.cli._common import USAGE_ERROR, complain, message_of
from riskfield.errors import RiskfieldError

app = typer.Typer(
    name="riskfield",
    add_completion=False,
    rich_markup_mode=None,  # help and errors as plain text: they go into pipes and logs as well
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
        return complain(f"{message_of(error)} Try '{context.command_path if context else 'riskfield'} --help'.")
    except (RiskfieldError, OSError, ValueError, MemoryError) as error:
        return complain(message_of(error))
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if os.environ.get("RISKFIELD_TRACEBACK"):
            traceback.print_exc()
        hint = "This is a bug; RISKFIELD_TRACEBACK=1 in the environment shows where."
        complain(f"{type(error).__name__}: {message_of(error)} {hint}")
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


app.command()(infer.infer)
app.command()(fit.fit)
app.command()(run.run)
app.command()(predict.predict)
app.command()(evaluate.evaluate)
app.command()(report.report)
