"""The bundled templates, one cookiecutter directory per layer family. No code here."""
