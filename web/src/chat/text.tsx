import { Component, createRef, type JSX } from "preact";
import { useRef } from "preact/hooks";
import { Blocks, render, tamed } from "../markdown";
import { whole } from "../ui/format";
import { download } from "../ui/parts";
import type { TokenLogprob } from "./types";

/** The longest text that is shown as markdown; a longer one is shown as plain text. */
const MOST_MARKDOWN = 128 * 1024;
const MOST_BLOCKS = 2000;
/** The longest plain text; of a longer one only the end is shown, because the layout of megabytes takes seconds. */
const MOST_PLAIN = 64 * 1024;

interface BlockProps {
  text: string;
}

/** The time per frame for rendering blocks, in milliseconds. The remaining blocks wait for the next frame. */
const FRAME_MS = 12;
let spent = 0;
let frame = 0;
const late = new Set<Block>();

function nextFrame(): void {
  frame = 0;
  spent = 0;
  for (const block of late) {
    if (spent > FRAME_MS) break;
    late.delete(block);
    timed(block);
  }
  if (late.size) frame = requestAnimationFrame(nextFrame);
}

function timed(block: Block): void {
  const began = performance.now();
  block.fill();
  spent += performance.now() - began;
}

/** Renders a block, now or in one of the next frames. */
function fillSoon(block: Block): void {
  frame ||= requestAnimationFrame(nextFrame);
  if (spent > FRAME_MS) late.add(block);
  else timed(block);
}

/** A block of markdown, which is rendered again only if its text changes. */
class Block extends Component<BlockProps> {
  private element = createRef<HTMLDivElement>();

  override shouldComponentUpdate(next: BlockProps): boolean {
    return next.text !== this.props.text;
  }

  override componentDidMount(): void {
    fillSoon(this);
  }

  override componentDidUpdate(): void {
    fillSoon(this);
  }

  override componentWillUnmount(): void {
    late.delete(this);
  }

  fill(): void {
    const element = this.element.current;
    if (!element) return;
    const content = render(this.props.text);
    element.className = content ? "block" : "block plain";
    element.replaceChildren(content ?? tamed(this.props.text.trimEnd()));
  }

  render(): JSX.Element {
    return <div class="block" ref={this.element} />;
  }
}

/** A model's text as markdown, also while it grows. */
export function Markdown({ text }: { text: string }): JSX.Element {
  const blocks = useRef<Blocks | null>(null);
  if (text.length > MOST_MARKDOWN) return <Plain text={text} />;
  blocks.current ??= new Blocks();
  const found = blocks.current.update(text);
  if (found.length > MOST_BLOCKS) return <Plain text={text} />;
  return (
    <div class="markdown">
      {found.map((block, index) => (
        <Block key={index} text={block} />
      ))}
    </div>
  );
}

/** Plain text; only the end if it is very long. */
export function Plain({ text }: { text: string }): JSX.Element {
  if (text.length <= MOST_PLAIN) return <div class="plain">{tamed(text)}</div>;
  return (
    <>
      <p class="note">
        {whole(text.length)} characters: the last {whole(MOST_PLAIN)} are shown.{" "}
        <button
          type="button"
          class="quiet"
          onClick={() => download(new Blob([text], { type: "text/plain;charset=utf-8" }), "answer.txt")}
        >
          Download all of it
        </button>
      </p>
      <div class="plain">{tamed(text.slice(-MOST_PLAIN))}</div>
    </>
  );
}

const MOST_TOKENS = 16_384;
const TOKENS_A_RUN = 128;

/** The number of a token's class, p0 to p9: its probability in tenths. */
function likelihood(logprob: number): number {
  return Math.min(9, Math.max(0, Math.floor(Math.exp(logprob) * 10)));
}

function shown(token: string): string {
  return JSON.stringify(token).slice(1, -1);
}

function explanation({ token, logprob, top }: TokenLogprob): string {
  const share = (value: number) => `${(100 * Math.exp(value)).toFixed(1)} %`;
  const others = top.map((other) => `${shown(other.token)}  ${share(other.logprob)}`);
  return [`${shown(token)}  ${share(logprob)}`, "", ...others].join("\n");
}

interface RunProps {
  tokens: TokenLogprob[];
  from: number;
  to: number;
}

/** A run of tokens, rendered once: only the last run of a text changes. */
class Run extends Component<RunProps> {
  override shouldComponentUpdate(next: RunProps): boolean {
    return next.to !== this.props.to || next.tokens !== this.props.tokens;
  }

  render({ tokens, from, to }: RunProps): JSX.Element {
    return (
      <>
        {tokens.slice(from, to).map((token, index) => (
          <span key={index} class={`token p${likelihood(token.logprob)}`} title={explanation(token)}>
            {tamed(token.token)}
          </span>
        ))}
      </>
    );
  }
}

/** Tokens coloured by their probability. */
export function Coloured({ tokens }: { tokens: TokenLogprob[] }): JSX.Element {
  const end = Math.min(tokens.length, MOST_TOKENS);
  const runs = [];
  for (let from = 0; from < end; from += TOKENS_A_RUN) {
    runs.push(<Run key={from} tokens={tokens} from={from} to={Math.min(end, from + TOKENS_A_RUN)} />);
  }
  return (
    <>
      <div class="plain tokens">{runs}</div>
      <p class="scale" aria-hidden="true">
        unlikely
        {[0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((tenth) => (
          <span key={tenth} class={`token p${tenth}`} />
        ))}
        likely
      </p>
      {tokens.length > end && <p class="note">The first {whole(end)} tokens are coloured.</p>}
    </>
  );
}
