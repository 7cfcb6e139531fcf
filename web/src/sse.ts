/** One event of a stream of server-sent events. */
export interface ServerEvent {
  event: string;
  data: string;
}

/**
 * Reads server-sent events out of chunks of text, in time linear in their length.
 *
 * A line that spans many chunks is kept as a list of pieces: searching one growing string again
 * for each chunk would take quadratic time.
 */
export class EventParser {
  private pieces: string[] = [];
  private event = "";
  private data: string[] = [];
  private afterReturn = false;

  /** Adds a chunk; returns the events that it completes. */
  push(chunk: string): ServerEvent[] {
    const found: ServerEvent[] = [];
    let start = 0;
    if (this.afterReturn && chunk.startsWith("\n")) start = 1;
    if (chunk) this.afterReturn = chunk.endsWith("\r");
    const ending = /\r\n|\n|\r/g;
    ending.lastIndex = start;
    for (let match = ending.exec(chunk); match; match = ending.exec(chunk)) {
      this.pieces.push(chunk.slice(start, match.index));
      start = match.index + match[0].length;
      const line = this.pieces.length === 1 ? this.pieces[0]! : this.pieces.join("");
      this.pieces = [];
      const event = this.line(line);
      if (event) found.push(event);
    }
    if (start < chunk.length) this.pieces.push(chunk.slice(start));
    return found;
  }

  private line(line: string): ServerEvent | null {
    if (line === "") {
      if (!this.data.length) {
        this.event = "";
        return null;
      }
      const event = { event: this.event || "message", data: this.data.join("\n") };
      this.event = "";
      this.data = [];
      return event;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (field === "data") this.data.push(value);
    else if (field === "event") this.event = value;
    return null;
  }
}

/** Yields the events of a response's body as they arrive, until the body ends. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent> {
  const parser = new EventParser();
  const reader = body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    // A consumer that stops early closes the connection, so that the server stops computing.
    void reader.cancel().catch(() => undefined);
  }
}
