"""Attacks on what chats ask of a backend, and on what its answer becomes."""

from tests.attacks.attack import Attack

TOOLS = "tests.httpapi.test_tools"

ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="tools-are-left-out",
        file="localai_dist/serving/sampling.py",
        old="        options.Tools, options.ToolChoice = form.offer.tools, form.offer.choice\n",
        new="",
        reddens=(
            f"{TOOLS}.OfferTests.test_the_backend_is_told",
            "tests/process/test_tools.py::test_calls_in_a_whole_answer[0]",
        ),
        leaves_green=("tests.serving.test_sampling", f"{TOOLS}.WholeAnswerTests"),
    ),
    Attack(
        name="a-choice-by-name-is-of-all",
        file="localai_dist/httpapi/openai/tools.py",
        old="if chosen in (None, function.name)]",
        new="]",
        reddens=(f"{TOOLS}.OfferTests.test_choices",),
        leaves_green=(f"{TOOLS}.OfferTests.test_the_backend_is_told", f"{TOOLS}.RefusalTests"),
    ),
    Attack(
        name="text-is-told-raw-and-split",
        file="localai_dist/httpapi/openai/text.py",
        old='text="".join(delta.content for delta in deltas) if split else',
        new='text="".join(delta.content for delta in deltas) + message.decode() if split else',
        reddens=(
            f"{TOOLS}.WholeAnswerTests.test_text_is_not_told_twice",
            f"{TOOLS}.StreamTests.test_thoughts_and_text",
        ),
        leaves_green=("tests.httpapi.test_openai",),
    ),
    Attack(
        name="ids-and-names-come-with-every-piece",
        file="localai_dist/httpapi/openai/calls.py",
        old='        name = "" if call.named else delta.name\n',
        new="        name = delta.name\n",
        reddens=(f"{TOOLS}.StreamTests.test_a_call_in_pieces", f"{TOOLS}.StreamTests.test_a_name_that_comes_late"),
        leaves_green=(f"{TOOLS}.WholeAnswerTests",),
    ),
    Attack(
        name="finish-reason-by-what-was-offered",
        file="localai_dist/httpapi/openai/text.py",
        old='        return "tool_calls" if self._calls.any else "stop"\n',
        new='        return "tool_calls"\n',
        reddens=(f"{TOOLS}.WholeAnswerTests.test_no_call", f"{TOOLS}.StreamTests.test_thoughts_and_text"),
        leaves_green=(f"{TOOLS}.WholeAnswerTests.test_calls",),
    ),
    Attack(
        name="a-second-call-that-nobody-wants",
        file="localai_dist/httpapi/openai/calls.py",
        old="        return self._single and self._count > 1\n",
        new="        return False\n",
        reddens=(f"{TOOLS}.StreamTests.test_one_call_was_wanted",),
        leaves_green=(f"{TOOLS}.StreamTests.test_a_call_in_pieces",),
    ),
    Attack(
        name="schemas-of-any-depth",
        file="localai_dist/httpapi/openai/tools.py",
        old="    for _ in range(MAX_DEPTH):\n",
        new="    for _ in range(MAX_DEPTH * 100):\n",
        reddens=(f"{TOOLS}.RefusalTests.test_depth",),
        leaves_green=(f"{TOOLS}.OfferTests",),
    ),
    Attack(
        name="keywords-nobody-keeps-to-are-left-out",
        file="localai_dist/serving/schemas.py",
        old="        if keyword not in known and keyword not in _NOTES:\n",
        new="        if keyword == keyword.upper():\n",
        reddens=(
            "tests.serving.test_schemas.RefusalTests.test_what_can_not_be_kept_to",
            f"{TOOLS}.RefusalTests.test_formats",
        ),
        leaves_green=("tests.serving.test_schemas.MatchTests.test_lengths",),
    ),
    Attack(
        name="properties-out-of-nowhere",
        file="localai_dist/serving/schemas.py",
        old="        if needed:\n            starts.clear()\n",
        new="",
        reddens=(
            "tests.serving.test_schemas.MatchTests.test_properties_that_may_be_absent",
            "tests.serving.test_schemas.MatchTests.test_everything_matched_is_valid",
        ),
        leaves_green=("tests.serving.test_schemas.MatchTests.test_lengths",),
    ),
    Attack(
        name="tools-no-template-has-a-place-for",
        file="localai_dist/backends/llama_cpp/engine.py",
        old='        if offered and not self._abilities.get("supports_tools", True):\n',
        new="        if False:\n",
        reddens=(
            "tests.backends.test_llama_tools.WithoutToolsTests.test_tools_nobody_would_hear_of",
            "tests/process/test_tools.py::test_a_model_without_a_place_for_tools",
        ),
        leaves_green=("tests.backends.test_llama_tools.ToolTests",),
    ),
    Attack(
        name="a-choice-by-name-as-the-engine-would-ignore-it",
        file="localai_dist/backends/llama_cpp/asked.py",
        old='        name, choice = _name_of(choice), "required"\n',
        new='        name, choice = _name_of(choice), "auto"\n',
        reddens=("tests.backends.test_llama_pure.GenerationTests.test_tool_choices",),
        leaves_green=("tests.backends.test_llama_pure.ReplyTests",),
    ),
)
