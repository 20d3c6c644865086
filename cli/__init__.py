"""The command line, installed as `torchshard_cli`.

Nothing here imports torch or torchshard, so that every command starts at once; only
`torchshard verify` does, and only when it runs. Inside this folder imports are relative:
the same files are `cli` in a checkout and `torchshard_cli` once installed.
"""
