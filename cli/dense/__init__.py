"""`torchshard new-layer NAME --from MODULE:CLASS`: a first sharded form of a dense module.

    source      the class, imported; its methods as text, and where the names in them come from
    constructor its constructor's signature
    sample      arguments and inputs with which the class runs
    division    which parameters are divided, and how
    declaration what the generated constructor does of that
    trial       one run, as generated, on a make-believe group of ranks
    asked       what --shard says
    choice      which parameters to divide: the best of the trials
    imports, text, remarks      pieces of the generated file
    reading     all of it as plain JSON, from which the template renders

The forward is the author's: what an operation does with a divided parameter is the engine's
to know. Modules here import torch inside functions, or are themselves imported by such a
function.
"""
