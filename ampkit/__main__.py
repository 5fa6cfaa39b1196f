"""Arguments of `python -m ampkit`."""

import argparse
import sys
from pathlib import Path

from . import _bench
from ._policy import Policy


def _policy(text: str) -> Policy:
    try:
        return Policy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # argparse hides the text of a ValueError


def main(argv: list[str] | None = None) -> None:
    """Run the command that `argv` (default: the process's arguments) names."""
    parser = argparse.ArgumentParser(prog="python -m ampkit", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    bench = commands.add_parser(
        "bench",
        help="time a training step: torch AMP, bare capture, graphed_step",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    bench.add_argument("--model", nargs="+", choices=sorted(_bench.CASES), default=["resnet18-cifar"])
    bench.add_argument("-b", "--batch-size", nargs="+", type=int, default=[64])
    bench.add_argument("--policy", type=_policy, default="float16", help="dtypes, see ampkit.Policy")
    bench.add_argument("--repeats", type=int, default=7)
    bench.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    bench.add_argument("--plot", type=Path, default=None, help="also draw them into this image file")
    args = parser.parse_args(argv)
    try:
        _bench.run(args.model, args.batch_size, args.policy, args.repeats, args.json, args.plot)
    except _bench.NoDeviceError as error:
        sys.exit(f"python -m ampkit bench: {error}")


if __name__ == "__main__":
    main()
