"""The command line for tables on disk: its commands, and how errors end them.

Invariants:
- with --json a command writes one JSON object to the standard output, and nothing else there;
- exit codes: 0 = done; 1 = `check` found damage, or the user declined or closed the output; 2 = the command failed,
  with the reason on stderr; 130 = interrupted and 143 = terminated, after unfinished work was undone;
- a command imports slow modules, such as NumPy and torch, when it runs.
"""

import re
import signal
from typing import Any

import click

from oneemb.cli.backup import backup
from oneemb.cli.check import check, compact
from oneemb.cli.inspect import inspect
from oneemb.cli.objects import pull, push, stored
from oneemb.cli.plan import plan_command
from oneemb.cli.publish import publish_command
from oneemb.cli.quantize import quantize_command
from oneemb.cli.rows import export_command, import_command
from oneemb.cli.salvage import salvage
from oneemb.cli.snapshots import merge_deltas_command, reshard_command, snapshot
from oneemb.cli.warmup import warmup_command

_INTERRUPTED = 128 + signal.SIGINT


class _Failure(click.ClickException):
    exit_code = 2


class _Group(click.Group):
    """Group of commands that prints errors which a user can fix without a traceback."""

    # click would end an interrupted command with 1, as if the user had declined.
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(_INTERRUPTED) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(_INTERRUPTED)

    def _invoke(self, ctx: click.Context) -> Any:
        from oneemb.storage.errors import StorageError

        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (StorageError, ValueError, TypeError, ImportError, OSError) as error:
            raise _Failure(_in_options(str(error))) from error


def _in_options(text: str) -> str:
    """An error's text with options of the command line in place of arguments of functions."""
    text = re.sub(r"\b([a-z_]+)=True\b", lambda match: "--" + match[1].replace("_", "-"), text)
    text = re.sub(r"\b([a-z_]+)=False\b", lambda match: "no --" + match[1].replace("_", "-"), text)
    text = re.sub(r"\b([a-z_]+)=\.\.\.", lambda match: "--" + match[1].replace("_", "-"), text)
    return text.replace("keys=None", "--row-numbers").replace("without with_state", "without --with-state")


@click.group(cls=_Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="oneemb")
@click.pass_context
def oneemb(context: click.Context) -> None:
    """Embedding tables on disk: look at them, check them, move rows in and out; and plan training jobs."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (
    inspect, check, snapshot, backup, salvage, push, pull, stored, compact, merge_deltas_command, reshard_command,
    export_command, import_command, quantize_command, plan_command, warmup_command,
    publish_command,
):  # fmt: skip
    oneemb.add_command(_command)
