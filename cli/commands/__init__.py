"""The commands, in click: each reads its words, makes or reads a plan, and shows it."""
