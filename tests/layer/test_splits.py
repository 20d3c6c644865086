"""How a class says that it can be divided, and what of a divided dim stays together."""

import pytest
import torchshard as ts
from torchshard.errors import LayoutError
from torchshard.layout import Axis, Segment, covering
from torchshard.packing import Packing
from torchshard.splits import FEATURES, Split, in_words, split_named


def test_codes_and_names_mean_the_same_split():
    """TorchShard's dim codes: None whole, 1 and -1 column, 0 row; or the names themselves."""
    dims = (None, 1, -1, "column", 0, "row")
    names = ["whole", "column", "column", "column", "row", "row"]
    assert [split_named(FEATURES, dim) for dim in dims] == names
    assert [ts.split_of(dim) for dim in dims] == names


def test_a_class_with_one_split_without_a_code_is_divided_so():
    """None asks for the only split of such a class, and for no split of any other."""
    assert split_named({"heads": Split("the heads")}, None) == "heads"
    assert split_named({"heads": Split("the heads", (1,))}, None) == "whole"
    assert split_named({}, None) == "whole"


@pytest.mark.parametrize("dim", [2, True, False, "vocabulary", 1.0])
def test_other_values_are_refused_with_those_that_there_are(dim):
    """The error names every code, every name, and what each divides."""
    with pytest.raises(LayoutError) as error:
        split_named(FEATURES, dim)
    assert str(error.value) == (
        f"dim={dim!r} is no split. Expected None (not divided), 1, -1 or 'column' (the"
        " output features are divided), 0 or 'row' (the input features are divided)."
    )


def test_every_zoo_layer_that_takes_dim_names_its_splits():
    """`dim` codes of one class are different, and a class without dim has none."""
    import inspect

    import layer_zoo

    for name in layer_zoo.__all__:
        layer_class = getattr(layer_zoo, name)
        splits = getattr(layer_class, "splits", {})
        codes = [code for split in splits.values() for code in split.dims]
        assert len(set(codes)) == len(codes)
        if splits:
            takes_dim = "dim" in inspect.signature(layer_class).parameters
            assert takes_dim == bool(codes), name
            assert in_words(splits).count("divided") == len(splits) + 1


def test_packing_gives_each_kind_of_block_an_axis():
    """q, k and v of grouped queries: query heads, and key/value heads that serve four each."""
    packing = Packing(unit=64, blocks=(512, 128, 128), serves=(1, 4, 4))
    axes, segments = packing.divided("out", "out_features", 768)
    assert axes == {"out": Axis(8), "out_1": covering(Axis(8), 4)}
    assert segments == (Segment("out", 64), Segment("out_1", 64), Segment("out_1", 64))


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        (
            Packing(blocks=5),
            "blocks=5 does not divide out_features=12. Expected a number of equal blocks, or"
            " their sizes.",
        ),
        (
            Packing(blocks=(4, 4)),
            "blocks=(4, 4) do not add up to out_features=12. Expected the sizes of the"
            " packed parts.",
        ),
        (
            Packing(unit=5),
            "unit=5 does not divide out_features=12. Expected units of equal size.",
        ),
        (
            Packing(unit=3, blocks=(8, 4)),
            "unit=3 does not divide block 0 of out_features=12, which has 8 indices. Expected"
            " units of equal size.",
        ),
        (
            Packing(unit=(2, 2), blocks=3),
            "unit=(2, 2) has 2 numbers for 3 blocks. Expected one for each, or one number"
            " for all.",
        ),
        (
            Packing(serves=0),
            "serves=0 is less than 1. Expected how many units each unit serves.",
        ),
    ],
)
def test_packing_that_does_not_fit_is_refused(packing, message):
    """What was given, what was expected."""
    with pytest.raises(LayoutError) as error:
        packing.divided("out", "out_features", 12)
    assert str(error.value) == message
