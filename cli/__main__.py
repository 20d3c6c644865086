"""`python -m torchshard_cli`, or `python -m cli` in a checkout with nothing installed."""

from .main import main

main(prog_name="torchshard")
