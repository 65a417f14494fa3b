"""One YAML text becomes one model, or names what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from localai_dist.catalog.errors import BadModelFile
from localai_dist.catalog.model import ModelConfig, Parameters, Template, shards_of
from localai_dist.catalog.parse import parse_model
from localai_dist.ids import ModelName

TINY = """
name: tiny-facts
backend: llama-cpp
context_size: 256
threads: 1
embeddings: true
parameters:
  model: tiny-facts-1m-q8_0.gguf
  temperature: 0
  stop: ["</s>"]
template:
  use_tokenizer_template: true
options: ["gpu:off"]
some_key_of_a_later_version: [1, 2]
"""

HEAD = "name: a\nbackend: b\nparameters: {model: c}\n"


def inside(line: str) -> str:
    """The least model file with ``line`` among its parameters."""
    return f"name: a\nbackend: b\nparameters:\n  model: c\n  {line}\n"


class ParseTests(SynchronousTestCase):
    def refused(self, text: str) -> str:
        with self.assertRaises(BadModelFile) as caught:
            parse_model(text, source="broken.yaml")
        self.assertEqual(caught.exception.source, "broken.yaml")
        self.assertIn("broken.yaml", str(caught.exception))
        return caught.exception.reason

    def test_what_a_file_says(self) -> None:
        """
        The keys people write come out typed; keys nobody knows here are ignored.
        """
        model = parse_model(TINY, source="tiny.yaml")
        self.assertEqual(
            model,
            ModelConfig(
                name=ModelName("tiny-facts"),
                backend="llama-cpp",
                parameters=Parameters("tiny-facts-1m-q8_0.gguf", temperature=0, stop=("</s>",)),
                context_size=256,
                threads=1,
                embeddings=True,
                template=Template(True),
                options=("gpu:off",),
            ),
        )
        self.assertEqual(
            (model.model_file, model.identity, model.source), (*["tiny-facts-1m-q8_0.gguf"] * 2, "tiny.yaml")
        )

    def test_files_that_belong_to_it(self) -> None:
        """
        Companions are files of the model, each once; free options' values may be paths (LOAD-13).
        """
        model = parse_model(
            "{name: a, backend: b, parameters: {model: m-00001-of-00002.gguf}, mmproj: p, draft_model: d, tokenizer: t,"
            " lora_base: l, lora_adapter: p, lora_adapters: [x], options: ['vae:v/x', 'flag', 'k:'],"
            " overrides: ['o:v/x']}",
            source="a.yaml",
        )
        self.assertEqual(model.files(), ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "p", "d", "t", "l", "x"))
        self.assertEqual(model.option_values(), ("v/x",))

    def test_least_file(self) -> None:
        """
        A name, a backend and a weights file are enough.
        """
        model = parse_model("{name: a, backend: b, parameters: {model: c.gguf}}", source="a.yaml")
        self.assertEqual(model, ModelConfig(ModelName("a"), "b", Parameters("c.gguf")))

    def test_what_is_missing_is_named(self) -> None:
        """
        A file without name, backend or weights says which one it lacks.
        """
        self.assertIn("name is missing", self.refused("{backend: b, parameters: {model: c}}"))
        self.assertIn("backend is missing", self.refused("{name: a, parameters: {model: c}}"))
        self.assertIn("parameters.model is missing", self.refused("{name: a, backend: b}"))

    def test_what_is_wrong_is_named(self) -> None:
        """
        A key of a wrong type is named, and something that is no YAML says so in one line.
        """
        self.assertIn("context_size", self.refused("{name: a, backend: b, parameters: {model: c}, context_size: lots}"))
        self.assertIn("parameters.top_k", self.refused("{name: a, backend: b, parameters: {model: c, top_k: x}}"))
        self.assertIn("not YAML", self.refused("{name: [a"))
        self.assertNotIn("\n", self.refused("{name: [a"))
        self.assertIn("mapping", self.refused("just a text"))
        self.assertIn("mapping", self.refused(""))
        self.assertIn("not YAML", self.refused("name: !!python/object/apply:os.system [id]"))

    def test_wrong_shapes_in_plain_words(self) -> None:
        """
        A value of a wrong shape is told as an operator would: the key, what is wanted, what is there.
        """
        for line, words in (
            ("context_size: lots", "context_size: want a number, got text"),
            ("context_size: 1.5", "context_size: want a whole number, got a number"),
            ("context_size: -1", "context_size: want at least 0"),
            ("threads: 3000000000", "threads: want at most 2147483647"),
            ("f16: 1", "f16: want true or false, got a number"),
            ("options: gpu", "options: want a list, got text"),
            ("options: [{gpu: 1}]", "options[0]: want text, got keys with values"),
            ("parameters: tiny.gguf", "parameters: want keys with values, got text"),
            ("parameters: {model: c, top_p: [1]}", "parameters.top_p: want a number, got a list"),
            ("mmproj: 2020-01-01", "mmproj: want text, got date"),
            ("1: 2", "Expected `str` - at `key` in `$`"),
        ):
            rest = "" if line.startswith("parameters") else "\nparameters: {model: c}"
            self.assertEqual(self.refused(f"name: a\nbackend: b\n{line}{rest}"), words)
        self.assertEqual(self.refused("name: a\nbackend: b: c\n").partition(":")[0], "not YAML")
        self.assertIn("line 2, column 11", self.refused("name: a\nbackend: b: c\n"))

    def test_slips_of_the_pen(self) -> None:
        """
        An unknown key that is nearly a known one is pointed out, also where it is why a key is missing.
        """
        text = "{name: a, backend: b, contex_size: 1, n_ctx: 2, gallery: x, parameters: {model: c, temprature: 1}}"
        model = parse_model(text, source="a.yaml")
        said = ("unknown key contex_size: did you mean context_size?",)
        inside = ("unknown key parameters.temprature: did you mean parameters.temperature?",)
        self.assertEqual(model.hints, said + inside)
        self.assertEqual(
            model.revision, parse_model("{name: a, backend: b, parameters: {model: c}}", source="").revision
        )
        self.assertIn("backend is missing", self.refused("{name: a, backnd: b, parameters: {model: c}}"))
        self.assertIn("did you mean backend?", self.refused("{name: a, backnd: b, parameters: {model: c}}"))

    def test_what_yaml_itself_can_not_make(self) -> None:
        """
        A date that is none, or a text nested without end, is a bad model file like any other.
        """
        self.assertIn("can't be read", self.refused("name: 2020-99-99"))
        self.assertIn("can't be read", self.refused("[" * 3000))

    def test_values_that_are_none_of_their_kind(self) -> None:
        """
        A value that YAML's own kinds can't hold is told with its place, whatever the library stumbles over.
        """
        for value, words in (
            ("!!bool maybe", "not YAML: line 4, column 4: 'maybe' can't be read as bool"),
            ('!!int ""', "not YAML: line 4, column 4: '' can't be read as int"),
            ('!!float ""', "not YAML: line 4, column 4: '' can't be read as float"),
            ("!!timestamp foo", "not YAML: line 4, column 4: 'foo' can't be read as timestamp"),
            ("2020-99-99", "can't be read as timestamp: month must be in 1..12"),
            ("9" * 5000, "can't be read as int"),
            ("!!binary ü", "failed to convert base64 data"),
            ('"\\UFFFFFFFF"', "can't be read as YAML"),
            ("{[]: 1}", "found unhashable key"),
        ):
            self.assertIn(words, self.refused(HEAD + f"x: {value}"))

    def test_numbers_no_backend_can_be_told(self) -> None:
        """
        A number that the contract with backends can't carry is wrong where it is written, not at every request.
        """
        for key in ("top_k", "seed"):
            for number in (2**31, -(2**31) - 1, 10**30):
                self.assertIn(f"parameters.{key}: want at", self.refused(inside(f"{key}: {number}")))
            parse_model(inside(f"{key}: {-(2**31)}"), source="a")
        for key in ("gpu_layers", "threads", "context_size", "batch"):
            self.assertIn(f"{key}: want at most 2147483647", self.refused(HEAD + f"{key}: 2147483648"))
        self.assertIn("parameters.max_tokens: want at most", self.refused(inside("max_tokens: 2147483648")))
        numbers = (".inf", "-.inf", ".nan", "1.0e+39", "-1.0e+39", str(10**39), str(10**400))
        for key in ("temperature", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty"):
            for written in numbers:
                words = f"parameters.{key}: want a number that 32 bits hold"
                self.assertEqual(self.refused(inside(f"{key}: {written}")), words)
        for written in numbers:
            self.assertIn("lora_scale: want a number", self.refused(HEAD + f"lora_scale: {written}"))
            self.assertIn("lora_scales[1]: want a number", self.refused(HEAD + f"lora_scales: [1, {written}]"))

    def test_aliases(self) -> None:
        """
        Anchors and merged keys work as people use them.
        """
        text = HEAD + "stopwords: &s [a, b]\noptions: *s\nx: &x {threads: 3, f16: true}\n<<: *x\n"
        model = parse_model(text, source="a")
        self.assertEqual((model.options, model.threads, model.f16), (("a", "b"), 3, True))

    def test_alias_bombs(self) -> None:
        """
        Aliases that stand for more than a model file can mean are refused before anything is made of them.
        """
        layers = "".join(f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 9)}]\n" for n in range(9))
        merges = "".join(f"l{n + 1}: &l{n + 1} {{<<: [{', '.join([f'*l{n}'] * 9)}]}}\n" for n in range(9))
        for text, words in (
            ("l0: &l0 [lol, lol]\n" + layers, "more than 1048576 characters"),
            ("l0: &l0 {a: lol}\n" + merges, "more than 1048576 characters"),
            (f"x: &x {'a' * 20000}\noptions: [{', '.join(['*x'] * 60)}]", "more than 1048576 characters"),
            (f"x: &x a\noptions: [{', '.join(['*x'] * 101)}]", "more than 100 aliases"),
            ("x: &x [*x]", "stands inside of what it names"),
            ("x: [*x]", "undefined alias"),
        ):
            self.assertIn(words, self.refused(HEAD + text))

    def test_hints_are_bounded_and_printable(self) -> None:
        """
        Very many unknown keys cost little, and a key that can't be shown is no hint.
        """
        many = "".join(f"key{number}: 1\n" for number in range(2000))
        self.assertEqual(parse_model(HEAD + many + "thread: 1\n", source="a").hints, ())
        self.assertEqual(parse_model(HEAD + '"threads\\a": 1\n', source="a").hints, ())
        self.assertIn("characters that are none", self.refused(HEAD + '"threads\\ud800": 1\n'))

    def test_text_that_is_no_text(self) -> None:
        """
        Half of a surrogate pair, which no backend and no client could be told, is refused wherever it stands.
        """
        head = "backend: b\nparameters: {model: c}\n"
        for line in ('name: "a\\ud800"', 'name: a\nsystem_prompt: "\\ud800"', 'name: a\noptions: ["\\ud800"]'):
            self.assertIn("characters that are none", self.refused(head + line))

    def test_names_that_can_not_be(self) -> None:
        """
        A name with a space, a control character or # in it, or one longer than the registry holds, is refused.
        """
        for name in ("a b", "a#0", "a\\tb", "a" * 256):
            self.assertIn("name", self.refused(f'{{name: "{name}", backend: b, parameters: {{model: c}}}}'))

    def test_names_that_are_no_folder(self) -> None:
        """
        A model's name names a folder on the workers: one that would lead out of it is refused, one with / is fine.
        """
        for name in ("..", ".", "../../x", "a//b", "/a", "a/", "a/../b", "a\\\\b", "a\\x7f", "é" * 128):
            self.assertIn("name: ", self.refused(f'{{name: "{name}", backend: b, parameters: {{model: c}}}}'))
        self.assertEqual(parse_model("{name: a/b, backend: b, parameters: {model: c}}", source="a").name, "a/b")
        for name in ("b" * 256, "a\\0"):
            self.assertIn("backend: ", self.refused(f'{{name: a, backend: "{name}", parameters: {{model: c}}}}'))

    def test_paths_that_can_not_be_copied(self) -> None:
        """
        A path that no worker could store is refused; one that is only written oddly is fine.
        """
        for path in ("a\\nb", "a\\x7f", "a" * 238, "a/" * 1100 + "b", "a/" * 62 + "b"):
            text = f'{{name: a, backend: b, parameters: {{model: c}}, mmproj: "{path}"}}'
            self.assertIn("can't be copied to a worker", self.refused(text))
        deepest = "a/" * 61 + "b" * 237
        parse_model(f"{{name: a, backend: b, parameters: {{model: {deepest}}}}}", source="a")
        model = parse_model("{name: a, backend: b, parameters: {model: ./d//c.gguf}}", source="a")
        self.assertEqual(model.model_file, "./d//c.gguf")

    def test_paths_stay_inside(self) -> None:
        """
        A model file can't make a worker read or write outside of the models folder.
        """
        for path in ("/etc/passwd", "../secrets", "a/../../b", "a\\\\b", "folder/", "."):
            self.assertIn("models folder", self.refused(f'{{name: a, backend: b, parameters: {{model: "{path}"}}}}'))
        for key in ("mmproj", "draft_model", "lora_adapter"):
            text = f"{{name: a, backend: b, parameters: {{model: c}}, {key}: ../x}}"
            self.assertIn("models folder", self.refused(text))

    def test_adapters(self) -> None:
        """
        One adapter or several, with one scale or several.
        """
        head = "name: a\nbackend: b\nparameters: {model: c}\n"
        one = parse_model(head + "lora_adapter: x.bin\nlora_scale: 0.5\n", source="a")
        self.assertEqual((one.lora_adapters, one.lora_scales), (("x.bin",), (0.5,)))
        two = parse_model(head + "lora_adapters: [x.bin, y.bin]\nlora_scales: [1, 2]\n", source="a")
        self.assertEqual((two.lora_adapters, two.lora_scales), (("x.bin", "y.bin"), (1, 2)))

    @given(st.text(max_size=200))
    def test_any_text_is_a_model_or_a_bad_model_file(self, text: str) -> None:
        """
        Whatever a file holds, reading it ends in a model or in one clear refusal.
        """
        try:
            parse_model(text, source="any.yaml")
        except BadModelFile:
            pass

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner)))
    def test_any_value_for_a_key(self, value: object) -> None:
        """
        Whatever stands at a known key, the file is a model or a bad model file.
        """
        import json

        for key in ("parameters", "options", "threads", "template", "name"):
            try:
                parse_model(json.dumps({"name": "a", "backend": "b", key: value}), source="any.yaml")
            except BadModelFile:
                pass


class FilesTests(SynchronousTestCase):
    def test_a_model_names_its_files_once(self) -> None:
        """
        The weights come first, then the companions, each once.
        """
        model = ModelConfig(
            ModelName("a"), "b", Parameters("w.gguf"), mmproj="p.gguf", draft_model="w.gguf", lora_adapters=("l.bin",)
        )
        self.assertEqual(model.files(), ("w.gguf", "p.gguf", "l.bin"))

    def test_shards(self) -> None:
        """
        The first piece of a split model stands for all its pieces; another piece or a whole file for itself.
        """
        self.assertEqual(
            shards_of("d/x-00001-of-00003.gguf"),
            ("d/x-00001-of-00003.gguf", "d/x-00002-of-00003.gguf", "d/x-00003-of-00003.gguf"),
        )
        self.assertEqual(shards_of("x-00002-of-00003.gguf"), ("x-00002-of-00003.gguf",))
        self.assertEqual(shards_of("x.gguf"), ("x.gguf",))


class RevisionTests(SynchronousTestCase):
    def test_layout_does_not_count(self) -> None:
        """
        Comments, order of keys, defaults written out and the file's name leave the revision alone.
        """
        plain = parse_model("{name: a, backend: b, parameters: {model: c}}", source="1.yaml")
        other = parse_model(
            "# comment\nbackend: b\nparameters:\n  model: c\nmmap: true\nname: a\nthreads: 0\n", source="2.yaml"
        )
        self.assertEqual(plain.revision, other.revision)
        self.assertRegex(plain.revision, r"\A[0-9a-f]{32}\Z")

    def test_every_meaning_counts(self) -> None:
        """
        Any change of meaning changes the revision.
        """
        model = parse_model(TINY, source="tiny.yaml")
        changed = [
            replace(model, threads=2),
            replace(model, backend="other"),
            replace(model, options=("gpu:on",)),
            replace(model, parameters=replace(model.parameters, temperature=0.1)),
            replace(model, template=Template(False)),
        ]
        self.assertEqual(len({one.revision for one in [model, *changed]}), 6)

    def test_known_value(self) -> None:
        """
        The revision is the same in every process and version: replicas are matched by it.
        """
        model = ModelConfig(ModelName("a"), "b", Parameters("c.gguf"))
        self.assertEqual(model.revision, "b6b6cfc65c9df3c48363a4b8e55daec3")
