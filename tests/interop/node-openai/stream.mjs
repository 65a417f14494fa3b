// One streamed chat by the official client; tells what it sees, as it sees it, one JSON line each.
// The comments are no part of what the client gives its caller: they are read off a copy of the body.
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const tell = (event, more = {}) => process.stdout.write(JSON.stringify({ event, ...more }) + "\n");

async function comments(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of body) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith(":")) tell("comment", { text: line });
  }
}

const client = new OpenAI({
  baseURL,
  apiKey,
  maxRetries: 0,
  fetch: async (url, init) => {
    const response = await fetch(url, init);
    if (!response.body) return response;
    const [own, theirs] = response.body.tee();
    comments(own).catch(() => {});
    return new Response(theirs, response);
  },
});

try {
  const stream = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: "go" }],
    stream: true,
  });
  tell("open");
  for await (const chunk of stream) {
    const text = chunk.choices[0]?.delta?.content;
    if (text) tell("token", { text });
  }
  tell("done");
} catch (error) {
  tell("error", { official: error instanceof OpenAI.APIError, message: error.message, code: error.code ?? null });
}
