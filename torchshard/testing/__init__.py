"""Tools to prove a sharded layer right: launch ranks, compare with the dense twin."""
