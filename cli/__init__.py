"""The command line, installed as `torchshard_cli`.

Nothing here imports torch or torchshard, so that every command starts at once; only
`torchshard verify`, `doctor` and `--from` do, and only when they run. Inside this folder
imports are relative: the same files are `cli` in a checkout and `torchshard_cli` once installed.

Where things are:

    a command       main (new-layer, check), update, diff, destroy, templates_command,
                    templates_test, verify, doctor, completion; pytest_plugin
    its plan        new_layer, from_dense -> layer -> plan of entry; merge, states
    carried out     alone, apply, journal, lock, header
    on a project    target, text_file, package_source, package_init, package_removal
    a template      catalogue, source, fetch, trust -> template of options, template_files,
                    partials -> render with snake, hooks; new_template, trial
    a name          names, collisions, torch_names, layer_name, numbers
    with people     group, errors, ask, interview, show, show_templates, show_proof
    a proof         cases, proof
    dense/          reading a dense module and dividing it by trial
    health/         what doctor looks at
"""
