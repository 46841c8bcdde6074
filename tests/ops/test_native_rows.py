"""Products of many rows: the same bits for a row in any company, at every count where another kernel or tile begins."""

import pytest
import torch
from gguf import GGMLQuantizationType, quantize

from paceline.ops import native, reference
from paceline.ops.native.library import FORMATS, SOURCES, library
from tests.ops.test_native_kernels import matmul, quantized_rows, randn

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason())),
    pytest.mark.usefixtures("instruction_set"),
]

COUNTS = (1, 2, 4, 5, 6, 7, 8, 13, 63, 64, 65, 130)
SHAPES = [(16, 32), (33, 96), (40, 64)]  # one panel, an odd number of panels, a panel that is not full


@pytest.mark.parametrize("outputs, inputs", SHAPES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "int8"])
@pytest.mark.parametrize("wide", [False, True])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(outputs: int, inputs: int, kind: str, wide: bool) -> None:
    weight, x = randn(outputs, inputs), randn(max(COUNTS), inputs, seed=1)
    source, wanted, data = "float32", FORMATS["int8"], weight
    if kind != "int8":
        source, wanted = kind, library().pl_natural_format(SOURCES[kind])
        data = torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[kind]))
    alone = torch.cat([matmul(source, wanted, data, (outputs, inputs), row[None], wide)[0] for row in x])
    _, unpacked = matmul(source, wanted, data, (outputs, inputs), x[:1])
    expected = reference.linear(quantized_rows(x, wide), unpacked)
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-4 * inputs**0.5)
    for count in COUNTS:
        out, _ = matmul(source, wanted, data, (outputs, inputs), x[:count], wide)
        assert torch.equal(out, alone[:count]), count
