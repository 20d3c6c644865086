"""`torchshard new-layer NAME --from MODULE:CLASS`: a first sharded form of a dense module.

    source      the class, imported; what its code names, and where that comes from
    sample      arguments and inputs with which the class runs
    carry       its methods as text, with edits
    trial       one run on a make-believe group of two ranks: what meets a shard where
    choice      which parameters to divide: the best of the trials
    products    the functions that a generated file is given, as source
    reading     all of it as plain JSON, from which the template renders

Modules here import torch inside functions, or are themselves imported by such a function.
"""
