"""A request's wishes become the contract's call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.catalog.model import Parameters, Template
from localai_dist.serving.sampling import (
    Message,
    Sampling,
    chat_options,
    completion_options,
    embedding_options,
    token_limit,
)
from tests.serving.doubles import make_model

PRESET = make_model(
    parameters=Parameters("tiny.gguf", temperature=0.5, top_k=7, max_tokens=9, seed=3, stop=("A",)),
    stopwords=("A", "B"),
    threads=1,
)


class SamplingTests(SynchronousTestCase):
    def test_asked_over_preset_over_default(self) -> None:
        """
        What the client asks for wins over the model file, which wins over the defaults; a zero counts as asked.
        """
        plain = completion_options(make_model(), Sampling(), "p", correlation="")
        self.assertAlmostEqual(plain.Temperature, 0.9, places=6)
        self.assertEqual((plain.TopK, plain.Seed, plain.Tokens, list(plain.StopPrompts)), (40, -1, 0, []))
        preset = completion_options(PRESET, Sampling(), "p", correlation="")
        self.assertEqual((preset.Temperature, preset.TopK, preset.Seed, preset.Tokens), (0.5, 7, 3, 9))
        asked = completion_options(
            PRESET, Sampling(temperature=0, top_k=0, seed=0, max_tokens=1, stop=("C",)), "p", correlation="id"
        )
        self.assertEqual((asked.Temperature, asked.TopK, asked.Seed, asked.Tokens), (0, 0, 0, 1))
        self.assertEqual(list(asked.StopPrompts), ["C", "A", "B"])
        self.assertEqual((asked.Prompt, asked.CorrelationId, asked.Threads), ("p", "id", 1))

    def test_identity(self) -> None:
        """
        Every call names the model it wants, so that a backend holding another one refuses it.
        """
        model = make_model()
        for options in (
            completion_options(model, Sampling(), "p", correlation=""),
            chat_options(model, Sampling(), [Message("user", "p")], correlation=""),
            embedding_options(model, "p", correlation=""),
        ):
            self.assertEqual(options.ModelIdentity, "tiny.gguf")

    def test_chat_uses_the_template_of_the_weights(self) -> None:
        """
        Messages go to the engine as they are, for its own template; the text alone goes to one without a template.
        """
        said = [Message("user", "one"), Message("assistant", "two", name="n", tool_call_id="t", tool_calls="[]")]
        options = chat_options(make_model(), Sampling(), said, correlation="")
        self.assertTrue(options.UseTokenizerTemplate)
        self.assertEqual([(m.role, m.content) for m in options.Messages], [("user", "one"), ("assistant", "two")])
        self.assertEqual(options.Messages[1].tool_calls, "[]")
        self.assertEqual(options.Prompt, "one\ntwo")
        bare = chat_options(make_model(template=Template(False)), Sampling(), said, correlation="")
        self.assertEqual((bare.UseTokenizerTemplate, list(bare.Messages), bare.Prompt), (False, [], "one\ntwo"))

    def test_system_prompt(self) -> None:
        """
        The model's own system prompt opens a chat that brings none.
        """
        model = make_model(system_prompt="be brief")
        added = chat_options(model, Sampling(), [Message("user", "x")], correlation="")
        self.assertEqual([m.role for m in added.Messages], ["system", "user"])
        kept = chat_options(model, Sampling(), [Message("developer", "y"), Message("user", "x")], correlation="")
        self.assertEqual([m.content for m in kept.Messages], ["y", "x"])

    @given(st.integers(-(2**63), 2**63 - 1))
    def test_any_seed_fits(self, seed: int) -> None:
        """
        Clients send 64-bit seeds; the contract has 32 bits, and equal seeds stay equal.
        """
        options = completion_options(make_model(), Sampling(seed=seed), "p", correlation="")
        again = completion_options(make_model(), Sampling(seed=seed), "p", correlation="")
        self.assertEqual(options.Seed, again.Seed)
        self.assertTrue(options.Seed == -1 if seed == -1 else options.Seed >= 0)

    def test_token_limit(self) -> None:
        """
        The limit is the client's, else the model file's, else none.
        """
        self.assertEqual(token_limit(PRESET, Sampling(max_tokens=2)), 2)
        self.assertEqual(token_limit(PRESET, Sampling()), 9)
        self.assertEqual(token_limit(make_model(), Sampling()), 0)
