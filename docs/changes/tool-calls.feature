Chats take `tools`, `tool_choice`, `parallel_tool_calls`, `response_format`, `logprobs` and `logit_bias` as OpenAI's do, and answer with `tool_calls` and `reasoning_content`, streamed or whole; what can't be kept to is a 400 in words.
They were ignored before. `llama-cpp` calls tools where the model's chat template has a place for them. Field by field: `docs/reference/openai.md`.
