"""What would happen to which file, and carrying it out. Every command is a view of a plan."""
