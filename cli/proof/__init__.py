"""What `torchshard verify` proves, and the launch that proves it."""
