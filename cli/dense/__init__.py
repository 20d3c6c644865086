"""`torchshard new-layer NAME --from MODULE:CLASS`: a first sharded form of a dense module.

    source      the class, imported; what its code names, and where that comes from
    sample      arguments and inputs with which the class runs
    carry       its methods as text, with edits
    division    which parameters are divided, and how
    products    functions for forwards that meet shards; a generated file holds their source
    rules       which product computes what
    sites       a method run operation by operation: what is done to each
    trial       one run on a make-believe group of ranks
    choice      which parameters to divide: the best of the trials
    constructor, imports, text, remarks     pieces of the generated file
    reading     all of it as plain JSON, from which the template renders

Modules here import torch inside functions, or are themselves imported by such a function.
"""
