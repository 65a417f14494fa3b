"""The stubs in the repository are those of the contract."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from localai_dist.rpc import backend_pb2, generate


class StubsTests(SynchronousTestCase):
    def test_committed_stubs_are_current(self) -> None:
        """
        Whoever edits ``backend.proto`` and forgets to regenerate is told so.
        """
        for name, text in generate.generated().items():
            self.assertEqual((generate.HERE / name).read_text(), text, f"{name}: python -m localai_dist.rpc.generate")

    def test_names_travel_unchanged(self) -> None:
        """
        Backends of LocalAI find the service, the calls and the field numbers they know (WALK-12).
        """
        service = backend_pb2.DESCRIPTOR.services_by_name["Backend"]
        self.assertEqual(service.full_name, "backend.Backend")
        for method in ("Health", "Free", "LoadModel", "Status", "Predict", "PredictStream", "Embedding"):
            self.assertIn(method, service.methods_by_name)
        numbers = {
            ("PredictOptions", "Tokens"): 4,
            ("PredictOptions", "Messages"): 44,
            ("PredictOptions", "ModelIdentity"): 54,
            ("ModelOptions", "ModelFile"): 21,
            ("ModelOptions", "ModelPath"): 59,
            ("ModelOptions", "Options"): 62,
            ("Reply", "prompt_tokens"): 3,
            ("Reply", "chat_deltas"): 8,
            ("EmbeddingResult", "embeddings"): 1,
        }
        for (message, field), number in numbers.items():
            fields = backend_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name
            self.assertEqual(fields[field].number, number, f"{message}.{field}")

    def test_each_number_has_one_field(self) -> None:
        """
        An error state travels as -1, and predict options keep number 24 free, as the original does.
        """
        states = backend_pb2.StatusResponse.State
        self.assertEqual(states.Value("ERROR"), -1)
        taken = {field.number for field in backend_pb2.PredictOptions.DESCRIPTOR.fields}
        self.assertEqual(taken, set(range(1, 55)) - {24})
