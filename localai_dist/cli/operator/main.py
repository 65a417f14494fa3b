"""The command ``localai-dist`` itself: options for all, exit codes, errors as one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

import localai_dist
from localai_dist.cli.operator.api import NotFound
from localai_dist.cli.operator.context import Asked
from localai_dist.cli.operator.demo import demo
from localai_dist.cli.operator.doctor import doctor
from localai_dist.cli.operator.models import models
from localai_dist.cli.operator.nodes import nodes
from localai_dist.cli.operator.ops import ops
from localai_dist.errors import LocalAIDistError

DONE, FAILED, USAGE, NOT_FOUND = 0, 1, 2, 4


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(localai_dist.__version__, prog_name="localai-dist", message="%(prog)s %(version)s")
@click.option(
    "--server",
    envvar="LOCALAI_SERVER",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="A frontend's address (LOCALAI_SERVER).",
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="json is the API's own.")
@click.pass_context
def command(context: click.Context, server: str, output: str) -> None:
    """
    Look after a localai-dist cluster.

    The key comes from LOCALAI_CLI_API_KEY, or from the file LOCALAI_CLI_API_KEY_FILE names. Exit codes: 0 done,
    1 failure, 2 usage, 4 not found.
    """
    context.obj = Asked(server, output == "json")


for _part in (demo, nodes, models, ops, doctor):
    command.add_command(_part)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code. Errors are one line on stderr."""
    try:
        code = command.main(args=arguments, prog_name="localai-dist", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except click.exceptions.Abort:
        return _say("interrupted", FAILED)
    except click.exceptions.NoArgsIsHelpError as asked:
        click.echo(asked.format_message(), err=True)
        return USAGE
    except click.ClickException as mistake:
        return _say(mistake.format_message(), USAGE if isinstance(mistake, click.UsageError) else FAILED)
    except NotFound as missing:
        return _say(str(missing), NOT_FOUND)
    except LocalAIDistError as problem:
        return _say(str(problem), FAILED)
    except BrokenPipeError:  # the reader of our output left; Python would complain about stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _say(text: str, code: int) -> int:
    click.echo("localai-dist: " + " ".join(text.split()), err=True)
    return code


def main() -> None:
    """The console script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
