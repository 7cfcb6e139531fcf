import { Component, type JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { apiKey } from "../api";
import { whole } from "../ui/format";
import { CopyButton, IconButton } from "../ui/parts";
import { Calls } from "./calls";
import { asCurl, asPython } from "./request";
import { settings } from "./settings";
import { answering, regenerate, requestOf, say, show } from "./store";
import { Coloured, Markdown, Plain } from "./text";
import type { Node, Stats } from "./types";

interface Props {
  node: Node;
  /** The ids of this message and of its siblings, the other branches. */
  branches: string[];
  waiting: boolean;
  /** Changes whenever the message changes. */
  stamp: number | string;
}

function Branches({ node, branches }: { node: Node; branches: string[] }): JSX.Element | null {
  if (branches.length < 2) return null;
  const index = branches.indexOf(node.id);
  const move = (to: number) => () => show(node, branches[to]!);
  return (
    <span class="branches" role="group" aria-label="Branches">
      <IconButton icon="left" label="Branch before" disabled={index === 0} onClick={move(index - 1)} />
      <span>
        {index + 1}/{branches.length}
      </span>
      <IconButton icon="right" label="Branch after" disabled={index === branches.length - 1} onClick={move(index + 1)} />
    </span>
  );
}

/** Tokens per second: those after the first, over the time from the first chunk to the last. */
function rate({ tokens, elapsed }: Stats): string {
  if (tokens === null || tokens < 2 || elapsed < 1) return "";
  return `${((tokens - 1) / (elapsed / 1000)).toFixed(1)} tokens/s`;
}

const ENDS: Record<string, string> = {
  length: "cut at the length limit",
  stopped: "stopped",
  tool_calls: "calls tools",
  content_filter: "cut by a filter",
};

function Facts({ stats, model }: { stats: Stats; model: string }): JSX.Element {
  const facts = [
    stats.tokens !== null && `${whole(stats.tokens)} ${stats.tokens === 1 ? "token" : "tokens"}`,
    rate(stats),
    stats.ttft !== null && `TTFT ${stats.ttft < 10 ? stats.ttft.toFixed(1) : whole(stats.ttft)} ms`,
    stats.promptTokens !== null &&
      `prompt ${whole(stats.promptTokens)}${stats.cachedTokens ? `, ${whole(stats.cachedTokens)} cached` : ""}`,
    stats.reasoningTokens ? `${whole(stats.reasoningTokens)} of reasoning` : "",
    stats.finish !== null && ENDS[stats.finish],
    model,
  ];
  return <span class="facts">{facts.filter(Boolean).join(" · ")}</span>;
}

function Reasoning({ node, waiting }: { node: Node; waiting: boolean }): JSX.Element {
  const thinking = waiting && !node.content && !node.calls.length;
  return (
    <details class="reasoning">
      <summary>{thinking ? "Reasoning…" : "Reasoning"}</summary>
      <Plain text={node.reasoning} />
    </details>
  );
}

function Answer({ node, branches, waiting }: Props): JSX.Element {
  const withKey = Boolean(apiKey.value);
  return (
    <article class="message assistant" aria-label="Answer" aria-busy={waiting}>
      {node.reasoning && <Reasoning node={node} waiting={waiting} />}
      {node.content &&
        (settings.value.logprobs && node.logprobs.length ? (
          <Coloured tokens={node.logprobs} />
        ) : (
          <Markdown text={node.content} />
        ))}
      {node.calls.length > 0 && <Calls node={node} waiting={waiting} />}
      {waiting && !node.content && !node.reasoning && !node.calls.length && (
        <p class="dots">
          <span class="hidden">Waiting for the first token</span>
        </p>
      )}
      {node.error && (
        <p class="error" role="alert">
          {node.error}
        </p>
      )}
      {node.stats?.ignored && <p class="note">Without effect on this server: {node.stats.ignored}</p>}
      {!waiting && (
        <footer>
          {node.stats && <Facts stats={node.stats} model={node.model} />}
          <span class="actions">
            <Branches node={node} branches={branches} />
            <button
              type="button"
              class="quiet"
              disabled={answering.value !== null}
              onClick={() => void regenerate(node)}
            >
              Regenerate
            </button>
            <CopyButton label="Copy" text={() => node.content} />
            <CopyButton label="Copy as curl" text={() => asCurl(requestOf(node), withKey)} />
            <CopyButton label="Copy as Python" text={() => asPython(requestOf(node), withKey)} />
          </span>
        </footer>
      )}
    </article>
  );
}

function Editor({ node, onClose }: { node: Node; onClose: () => void }): JSX.Element {
  const [text, setText] = useState(node.content);
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => area.current?.focus(), []);
  const send = () => {
    onClose();
    void say(node.parent, text, node.images);
  };
  return (
    <form
      class="editor"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      <textarea
        ref={area}
        aria-label="Edit the message"
        rows={4}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => event.key === "Escape" && onClose()}
      />
      <span class="actions">
        <button type="submit" class="primary" disabled={answering.value !== null}>
          Send as a new branch
        </button>
        <button type="button" onClick={onClose}>
          Cancel
        </button>
      </span>
    </form>
  );
}

function Question({ node, branches }: Props): JSX.Element {
  const [editing, edit] = useState(false);
  return (
    <article class="message user" aria-label="Your message">
      {node.images.map((url, index) => (
        <img key={index} src={url} alt={`Attached image ${index + 1}`} />
      ))}
      {editing ? <Editor node={node} onClose={() => edit(false)} /> : <Plain text={node.content} />}
      {!editing && (
        <footer>
          <span class="actions">
            <Branches node={node} branches={branches} />
            <button type="button" class="quiet" onClick={() => edit(true)}>
              Edit
            </button>
            <CopyButton label="Copy" text={() => node.content} />
          </span>
        </footer>
      )}
    </article>
  );
}

function Results({ node, branches }: Props): JSX.Element {
  return (
    <article class="message results" aria-label="Results of tools">
      {node.results.map((result, index) => (
        <pre key={index} tabIndex={0} aria-label={`Result ${index + 1}`}>
          {result.content || "(empty)"}
        </pre>
      ))}
      <Branches node={node} branches={branches} />
    </article>
  );
}

/** A message. While one message grows, the unchanged ones are not rendered again. */
export class Message extends Component<Props> {
  override shouldComponentUpdate(next: Props): boolean {
    const { node, branches, waiting, stamp } = this.props;
    return next.node !== node || next.branches !== branches || next.waiting !== waiting || next.stamp !== stamp;
  }

  render(props: Props): JSX.Element {
    if (props.node.role === "user") return <Question {...props} />;
    if (props.node.role === "tool") return <Results {...props} />;
    return <Answer {...props} />;
  }
}
