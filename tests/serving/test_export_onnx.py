"""Programs of `graph.export` as ONNX models, translated as docs/export.md says, against the programs."""

import re
from pathlib import Path

import pytest
import torch

from tests.support.export_models import LOOKUPS, Score, embedding_at, train_rows, trained_click

pytest.importorskip("onnxscript", reason="needs onnxscript")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
PAGE = Path(__file__).parents[2] / "docs/export.md"


def outputs(folder, graph, batches, **options):
    """(output of the program, output of its ONNX model) of each batch; the first one is the example batch."""
    section = PAGE.read_text().split("\n## ONNX\n")[1].split("\n## ")[0]
    code = re.search(r"```python\n(.*?)\nto_onnx\(", section, re.DOTALL)
    names = {}
    exec(code[1], names)
    graph.export(folder / "one.pt2", *batches[0], **options)
    names["to_onnx"](folder / "one.pt2", folder / "one.onnx")
    program = torch.export.load(folder / "one.pt2").module()
    model = onnxruntime.InferenceSession(folder / "one.onnx")
    given = [input.name for input in model.get_inputs()]
    for batch in batches:
        (found,) = model.run(None, {name: tensor.numpy() for name, tensor in zip(given, batch, strict=True)})
        yield program(*batch), torch.from_numpy(found)


@pytest.mark.parametrize(("name", "dtype"), [("tables of ids", "float32"), ("ids", "int8")])
def test_an_onnx_model_looks_up_the_bits_of_its_program(tmp_path, name, dtype):
    embedding = embedding_at(tmp_path)
    train_rows(embedding)
    make, batch = LOOKUPS[name]
    for want, found in outputs(tmp_path, make(embedding), [batch(n, n) for n in (20, 7, 1, 0)], dtype=dtype):
        assert torch.equal(want, found)


def test_an_onnx_model_scores_as_its_program_with_ids_that_have_no_row(tmp_path):
    graph = Score(trained_click(tmp_path, drawn=True))
    batches = [(torch.randint(-70, 70, (n, 3), generator=torch.Generator().manual_seed(n)),) for n in (33, 1, 64)]
    for want, found in outputs(tmp_path, graph, batches):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-6)


def test_bags_are_refused_and_the_error_says_what_to_do(tmp_path):
    embedding = embedding_at(tmp_path)
    make, batch = LOOKUPS["sum"]
    with pytest.raises(torch.onnx.OnnxExporterError) as refused:
        list(outputs(tmp_path, make(embedding), [batch(20, 1)]))
    error = refused.value
    while error.__cause__:
        error = error.__cause__
    assert "pool the rows in build" in str(error)
