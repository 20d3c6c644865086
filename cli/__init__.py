"""The command line, installed as `torchshard_cli`.

Nothing here imports torch or torchshard, so that every command starts at once; only
`torchshard verify`, `doctor` and `--from` do, and only when they run. Inside this folder
imports are relative: the same files are `cli` in a checkout and `torchshard_cli` once installed.

Where things are. A room imports from those above it:

    errors      each with its exit code
    naming/     names of classes and modules, and numbers as people write them; snake, for Jinja
    project/    a project on disk: target, layer, header, lock (its new texts: plan), journal, alone (one writer at a
                time), collisions, text_file, and the edits of a package's __init__.py
    template/   catalogue, source, fetch, trust -> template of options, template_files, partials
                -> render with hooks; new_template; trial (every choice rendered and tested)
    proof/      cases, and the launch that proves them
    dense/      reading a dense module: source, sample; choice of what to divide, by trial; asked is
                what --shard says instead; declaration, constructor, text of the file
    plan/       new_layer, from_dense -> plan of entry; merge; states -> apply
    screen/     group (errors as exit codes), show, ask, interview
    health/     what doctor looks at
    commands/   a module each; new-layer is in main, which brings them together
"""
