import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { tamed } from "../markdown";
import { answering, giveResults, shown } from "./store";
import type { Node, ToolCall } from "./types";

const LONGEST_PRETTY = 64 * 1024;
const LONGEST_NAME = 200;

/** Indents the arguments of a call, once they are complete JSON. */
function pretty(text: string): string {
  if (text.length > LONGEST_PRETTY) return `${text.slice(0, LONGEST_PRETTY)}…`;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

interface CardProps {
  call: ToolCall;
  result: string;
  waiting: boolean;
  onResult: (text: string) => void;
}

function Card({ call, result, waiting, onResult }: CardProps): JSX.Element {
  const name = call.name.slice(0, LONGEST_NAME);
  return (
    <section class="call" aria-label={`Call of ${name || "a tool"}`}>
      <header>
        <span class="tag">call</span> <code>{tamed(name) || "…"}</code>
      </header>
      <pre tabIndex={0} aria-label="Arguments">
        {tamed(pretty(call.arguments)) || " "}
      </pre>
      {!waiting && (
        <label class="result">
          Result
          <textarea
            rows={2}
            value={result}
            placeholder="What the tool gives back, as text or JSON"
            onInput={(event) => onResult(event.currentTarget.value)}
          />
        </label>
      )}
    </section>
  );
}

/** The tool calls of an answer, with results that the user can type, edit and send. */
export function Calls({ node, waiting }: { node: Node; waiting: boolean }): JSX.Element {
  const next = shown.value.nodes[shown.value.shown[node.id] ?? ""];
  const sent = next?.role === "tool" ? next.results : [];
  const [typed, setTyped] = useState<Record<number, string>>({});
  const result = (index: number) => typed[index] ?? sent[index]?.content ?? "";
  const send = () => {
    setTyped({});
    void giveResults(
      node,
      node.calls.map(({ id }, index) => ({ id, content: result(index) })),
    );
  };
  return (
    <div class="calls">
      {node.calls.map((call, index) => (
        <Card
          key={index}
          call={call}
          result={result(index)}
          waiting={waiting}
          onResult={(text) => setTyped((before) => ({ ...before, [index]: text }))}
        />
      ))}
      {!waiting && (
        <button type="button" class="primary" disabled={answering.value !== null} onClick={send}>
          {sent.length ? "Send as a new branch" : node.calls.length > 1 ? "Send results" : "Send result"}
        </button>
      )}
    </div>
  );
}
