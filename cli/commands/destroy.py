"""`torchshard destroy`: take a generated layer back, and nothing that is not its own.

What is removed is what the lock lists, file by file: no folder is looked into, and none is
removed but `.torchshard`, once the last layer has left it empty. No template is rendered.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click

from ..errors import ConflictError, UsageError
from ..plan.apply import apply_plan
from ..plan.entry import Entry
from ..plan.plan import Plan, edit_note
from ..project.alone import alone_in, settle
from ..project.layer import Layer
from ..project.layer_name import complete_layer
from ..project.lock import LockedLayer, read_lock
from ..project.package_removal import remove_export
from ..project.target import find_root, inside, own_place
from ..project.text_file import read_file, read_text
from ..screen import show


@click.command(short_help="Remove a generated layer, its test and its export.")
@click.argument("name", shell_complete=complete_layer)
@click.option("--force", is_flag=True, help="Remove files that were edited too.")
@click.option("--dry-run", is_flag=True, help="Show the plan; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
def destroy(name: str, force: bool, dry_run: bool, as_json: bool) -> None:
    """Remove the layer NAME: the files generated for it, and its export from the package.

    A file that was edited is kept, and so is the layer's entry in the lock as long as
    there is one, so that --force can remove it later. No folder is removed.

    Exit code 0 if nothing is left of it, 1 if an edited file is; 0 for a dry run.

    \b
    Examples:
      torchshard destroy ParallelLinear --dry-run
      torchshard destroy layer_zoo.ParallelLinear --force
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    root = find_root(Path())
    settle(root)
    with nullcontext() if dry_run else alone_in(root):
        _run(plan_destroy(root, name, force=force), dry_run, as_json)


def _run(plan: Plan, dry_run: bool, as_json: bool) -> None:
    if not as_json:
        for line in show.plan_lines(plan.root, plan.entries):
            click.echo(line)
    if not dry_run:
        apply_plan(plan)
    if as_json:
        show.echo_json(show.plan_json(plan, is_dry_run=dry_run, with_diff=False))
    else:
        done = show.done_line(plan.entries)
        click.echo("dry run: nothing written" if dry_run else done)
    kept = [entry for entry in plan.entries if entry.status == "keep"]
    if kept and not dry_run:
        raise ConflictError(
            f"{show.plural(len(kept), 'edited file')} kept, so "
            f"{plan.layer.class_name} stays in the lock; --force removes all of it"
        )


def plan_destroy(root: Path, name: str, *, force: bool = False) -> Plan:
    """The plan that takes the layer `name` back; `force` also takes what was edited.

    Raises:
        UsageError: If there is no such layer, or if the package's `__init__.py` cannot be
            read.
    """
    lock = read_lock(root)
    locked = lock.find(name)
    entries = list(_own_entries(root, locked, force))
    is_module_kept = locked.layer.module_path in {
        entry.path for entry in entries if entry.status == "keep"
    }
    if not is_module_kept and "." in locked.layer.import_path:
        entries += _export_entries(root, locked.layer)
    return Plan(root, locked.layer, locked.template_hash, entries, lock)


def _own_entries(root: Path, locked: LockedLayer, force: bool) -> Iterator[Entry]:
    """An entry for each file of the layer that is still there."""
    module_path = locked.layer.module_path
    for path in sorted(locked.files, key=lambda path: (path != module_path, path)):
        base = locked.files[path].text
        file = read_file(inside(root, path))
        if file is None:
            continue
        note = edit_note(locked.layer, file.text, base)
        if own_place(root, path).is_symlink():
            note = "a link, which was not generated"
        entry = Entry(path, "remove", file.text, None, base=base)
        if note and not force:
            note = f"{note}; --force removes it"
            entry = replace(entry, status="keep", new=file.text)
        yield replace(entry, note=note)


def _export_entries(root: Path, layer: Layer) -> Iterator[Entry]:
    """The package's `__init__.py` without the class, if it has it."""
    path = f"{layer.package}/__init__.py"
    old = read_text(inside(root, path), keep_newlines=True)
    if old is None:
        return
    try:
        new = remove_export(old, layer.module, layer.class_name)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    if new != old:
        yield Entry(path, "update", old, new)
