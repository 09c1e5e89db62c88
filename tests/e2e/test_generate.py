"""Generation with prepared models: on all ranks, split over the ranks, and on one rank."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist import CellError, Session
from nbdist.errors import SessionError
from nbdist.strategies import STRATEGIES
from tests import engines

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARDED = {name for name, row in STRATEGIES.items() if "parameters" in row.shards}
SETUP = textwrap.dedent(
    """
    import nbdist
    from tests.models import gpt2, llama, t5

    ids = torch.arange(1, 13).view(3, 4)
    prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    greedy = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 8}

    def build(make=llama, lr=0.0):
        global expected, shapes
        torch.manual_seed(0)
        bare = make()
        expected = bare.eval().generate(**prompts, **greedy).tolist()
        shapes = {name: parameter.shape for name, parameter in bare.named_parameters()}
        trainable = [parameter for parameter in bare.parameters() if parameter.requires_grad]
        return accelerator.prepare(bare.train(), torch.optim.AdamW(trainable, lr=lr))

    def train(steps, between=lambda: None):
        losses = []
        for _ in range(steps):
            loss = model(**prompts, labels=ids).loss
            accelerator.backward(loss)
            between()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def generated(model, length):
        rows = model.generate(**prompts, **greedy | {"max_new_tokens": length}).tolist()
        return rows == [row[: len(row) - 8 + length] for row in expected]
    """
)
ADAPTED = """
from peft import LoraConfig, get_peft_model
model, optimizer = build(lambda: get_peft_model(llama(), LoraConfig(target_modules=['q_proj'])))
"""
TOKENIZER = textwrap.dedent(
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(211)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    """
)


@pytest.fixture(scope="module", params=engines.each("zero3"))
def prepared(request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session with a model whose weights do not change when it is trained."""
    with Session(nproc=2, backend=request.param) as session:
        session.run(SETUP + "\nmodel, optimizer = build()\nlosses = train(1)")
        yield session


def on_all(session: Session, code: str) -> Any:
    """Return the value of a cell, which is the same on both ranks."""
    zero, one = session.run(code).values.values()
    assert zero == one
    return zero


def test_ranks_generate_texts_of_different_lengths(prepared: Session) -> None:
    assert on_all(prepared, "generated(model, 3 + 5 * rank)") is True
    assert on_all(prepared, "generated(accelerator.unwrap_model(model), 8 - 5 * rank)") is True
    assert on_all(prepared, "train(1) == losses") is True


def test_inputs_are_split_and_come_back_in_order(prepared: Session) -> None:
    assert on_all(prepared, "nbdist.generate(model, prompts, **greedy).tolist() == expected")
    one_by_one = "nbdist.generate(model, prompts, batch_size=1, **greedy).tolist() == expected"
    assert on_all(prepared, one_by_one) is True
    twice = "nbdist.generate(model, prompts, num_beams=2, num_return_sequences=2, **greedy).shape"
    assert on_all(prepared, f"tuple({twice})") == (6, 12)
    assert on_all(prepared, "model.training, train(1) == losses") == (True, True)


def test_texts_of_different_lengths_continue_as_each_by_itself(prepared: Session) -> None:
    prepared.run(TOKENIZER)
    texts = on_all(
        prepared,
        "prompts_ = ['w5 w6 w7', 'w9', 'w1 w2 w3 w4 w5']\n"
        "nbdist.generate(model, prompts_, tokenizer, **greedy)",
    )
    alone = on_all(
        prepared, "[nbdist.generate(model, [p], tokenizer, **greedy)[0] for p in prompts_]"
    )
    assert texts == alone
    assert [len(text.split()) for text in texts] == [11, 9, 13]


def test_one_rank_uses_full_parameters_by_itself(prepared: Session) -> None:
    found = prepared.run(
        """
        with nbdist.full_parameters(model) as bare:
            found = [{name: p.shape for name, p in bare.named_parameters()} == shapes]
            if rank == 0:
                found += [generated(model, 8), generated(bare, 3)]
                found += [torch.equal(model(**prompts).logits, bare(**prompts).logits)]
        found
        """
    ).values
    assert found == {0: [True, True, True, True], 1: [True]}
    assert on_all(prepared, "generated(model, 3 + 5 * rank), train(1) == losses") == (True, True)


def test_a_sharded_model_on_one_rank_is_refused_before_it_hangs(prepared: Session) -> None:
    one_rank = r"but this cell runs on rank 0 only and would wait forever\. Run the cell without"
    with pytest.raises(CellError, match=rf"nbdist\.generate\(\) communicates.*{one_rank}"):
        prepared.run("nbdist.generate(model, prompts)", ranks=[0])
    with pytest.raises(CellError, match=rf"accelerator\.backward\(\) communicates.*{one_rank}"):
        prepared.run("accelerator.backward(torch.ones(2, requires_grad=True).sum())", ranks=[0])
    calls = {
        "The forward": "model(**prompts).logits.shape[0]",
        r"generate\(\)": "len(accelerator.unwrap_model(model).generate(**prompts, **greedy))",
    }
    backend = prepared.options.backend
    for call, code in calls.items():
        if backend in SHARDED or (call == "The forward" and backend == "ddp"):
            with pytest.raises(CellError, match=rf"{call} of a .*model.* with .*{one_rank}"):
                prepared.run(code, ranks=[0])
        else:
            assert prepared.run(code, ranks=[0]).values == {0: 3}
    with pytest.raises(CellError, match=rf"all_gather communicates with ranks 0-1, {one_rank}"):
        prepared.run("accelerator.gather(torch.ones(1))", ranks=[0])
    assert on_all(prepared, "train(1) == losses") is True


def test_inputs_that_cannot_be_split_are_one_sentence(prepared: Session) -> None:
    for inputs in ("'one text'", "['a', 'b']", "[]"):
        with pytest.raises(CellError, match="takes a list of texts with tokenizer"):
            prepared.run(f"nbdist.generate(model, {inputs})")
    with pytest.raises(CellError, match=r"needs a model with generate\(\), got Linear"):
        prepared.run("nbdist.generate(torch.nn.Linear(2, 2), prompts)")
    with pytest.raises(SessionError, match=r"generate\(\) works only on ranks"):
        nbdist.generate(None, [])


@pytest.mark.nightly
@pytest.mark.parametrize("backend", STRATEGIES)
def test_a_sample_between_backward_and_step_changes_no_loss(backend: str) -> None:
    def losses(session: Session, between: str) -> list[float]:
        session.run("model, optimizer = build(gpt2, lr=0.01)")
        return on_all(session, f"train(4, lambda: {between})")

    with Session(nproc=2, backend=backend) as session:
        session.run(SETUP)
        without = losses(session, "None")
        assert losses(session, "generated(model, 3 + 5 * rank)") == without
        evaluate = "torch.no_grad()(model)(**prompts)"
        assert losses(session, evaluate) == without
        session.run("def gather():\n    with nbdist.full_parameters(model):\n        pass")
        assert losses(session, "gather()") == without
        session.switch("zero3" if backend != "zero3" else "fsdp2")
        assert on_all(session, "len(nbdist.generate(model, prompts, **greedy))") == 3


@pytest.mark.nightly
@pytest.mark.parametrize("backend", STRATEGIES)
def test_an_adapter_and_an_encoder_decoder_generate(backend: str) -> None:
    with Session(nproc=2, backend=backend) as session:
        session.run(SETUP)
        for prepare in (ADAPTED, "model, optimizer = build(t5)"):
            session.run(prepare)
            assert on_all(session, "generated(model, 3 + 5 * rank)") is True
            assert on_all(session, "nbdist.generate(model, prompts, **greedy).tolist() == expected")
            session.run("losses = train(2)")
            assert on_all(session, "generated(model, 3 + 5 * rank), losses[0] == losses[1]") == (
                True,
                True,
            )


@pytest.mark.nightly
def test_an_adapter_generates_where_units_have_another_precision() -> None:
    """PEFT calls the model below the one whose forward Accelerate runs under autocast."""
    with Session(nproc=2, backend="fsdp1", precision="bf16") as session:
        session.run(SETUP + ADAPTED)
        assert on_all(session, "len(nbdist.generate(model, prompts, **greedy))") == 3
