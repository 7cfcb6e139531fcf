import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { explain, request } from "../api";
import { download, Icon } from "../ui/parts";
import { Backends } from "./backends";
import { Charts } from "./charts";
import { connect, feed } from "./feed";
import { Pages } from "./pages";
import { Replicas } from "./replicas";
import { Requests } from "./requests";
import { engine } from "./store";
import { Timeline } from "./timeline_view";

/** The message shown while the feed is not live. */
function Banner(): JSX.Element | null {
  const state = feed.value;
  if (state.kind === "live") return null;
  let text = "Connecting…";
  if (state.kind === "lost") text = `${state.message} It is tried again.`;
  if (state.kind === "refused") {
    text =
      state.status === 404
        ? "This server has no live feed, so there is nothing to see here. The chat works all the same."
        : state.message;
  }
  return (
    <p class={`banner ${state.kind}`} role="status">
      {text}
      {state.kind === "refused" && (
        <button type="button" onClick={connect}>
          Ask again
        </button>
      )}
    </p>
  );
}

function Trace(): JSX.Element {
  const [said, say] = useState("");
  const act = async () => {
    say("…");
    try {
      const response = await request("v1/live/trace");
      download(await response.blob(), "forebay-trace.json");
      say("");
    } catch (error) {
      say(explain(error));
    }
  };
  return (
    <span class="row">
      {said && <span role="status">{said}</span>}
      <button type="button" onClick={() => void act()} title="The steps of the server's ring, for Perfetto">
        <Icon name="download" /> Chrome trace
      </button>
    </span>
  );
}

/** The current activity of the server, or of a router's backends. */
export function EngineView(): JSX.Element {
  const start = engine.value?.start;
  return (
    <div class="engine">
      <Banner />
      {start && (
        <div class="headline">
          <span>
            <b>{start.model ?? start.server}</b> {start.model && <span class="unit">{start.server}</span>}
          </span>
          {!start.router && <Trace />}
        </div>
      )}
      {start &&
        (start.router ? (
          <Backends />
        ) : (
          <div class="cards">
            <Timeline />
            <Charts />
            <div class="column main">
              <Requests />
            </div>
            <div class="column">
              <Replicas />
              <Pages />
            </div>
          </div>
        ))}
    </div>
  );
}
