"""What people see and are asked: text, JSON, questions, and errors as exit codes."""
