import type { JSX } from "preact";
import { useId, useState } from "preact/hooks";
import { apiKey, loadFacts, loadModels, server, serverError, setApiKey } from "../api";
import type { ModelCard } from "../api";
import { connect } from "../engine/feed";
import { change, jsonError, loadServer, model, NO_SAMPLING, settings } from "./settings";
import { bytes } from "../ui/format";
import { setSystem, shown, version } from "./store";
import type { Sampling, Settings } from "./types";

function Key(): JSX.Element {
  const [text, setText] = useState(apiKey.value);
  const id = useId();
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        setApiKey(text);
        void loadServer();
        connect();
      }}
    >
      <label for={id}>API key</label>
      <div class="row">
        <input
          id={id}
          type="password"
          autocomplete="off"
          spellcheck={false}
          value={text}
          placeholder="none"
          onInput={(event) => setText(event.currentTarget.value)}
        />
        <button type="submit">Use</button>
      </div>
      <p class="note">Kept until this tab is closed, and sent to this server only.</p>
    </form>
  );
}

/** A model's name, with its state and size if the server reports them. */
function described(card: ModelCard): string {
  const more = [card.state, card.size === undefined ? undefined : bytes(card.size)].filter(Boolean);
  return more.length ? `${card.id} (${more.join(", ")})` : card.id;
}

function ModelChoice(): JSX.Element {
  const id = useId();
  return (
    <div>
      <label for={id}>Model</label>
      <select
        id={id}
        value={model()}
        onFocus={() => void loadModels()}
        onChange={(event) => {
          change({ model: event.currentTarget.value });
          void loadFacts(event.currentTarget.value);
        }}
      >
        {server.value.models.map((card) => (
          <option key={card.id} value={card.id}>
            {described(card)}
          </option>
        ))}
      </select>
      {serverError.value && (
        <p class="error" role="alert">
          {serverError.value}
        </p>
      )}
    </div>
  );
}

interface Field {
  name: keyof Sampling;
  label: string;
  step: string;
  min?: string;
  max?: string;
}

const FIELDS: Field[] = [
  { name: "temperature", label: "Temperature", step: "0.05", min: "0", max: "2" },
  { name: "top_p", label: "Top p", step: "0.05", min: "0", max: "1" },
  { name: "top_k", label: "Top k", step: "1", min: "-1" },
  { name: "min_p", label: "Min p", step: "0.01", min: "0", max: "1" },
  { name: "max_tokens", label: "Max tokens", step: "1", min: "1" },
  { name: "seed", label: "Seed", step: "1" },
  { name: "presence_penalty", label: "Presence penalty", step: "0.1", min: "-2", max: "2" },
  { name: "frequency_penalty", label: "Frequency penalty", step: "0.1", min: "-2", max: "2" },
  { name: "repetition_penalty", label: "Repetition penalty", step: "0.05", min: "0", max: "2" },
];

function SamplingFields(): JSX.Element {
  const id = useId();
  const values = settings.value.sampling;
  const set = (name: keyof Sampling, text: string) => change({ sampling: { ...settings.value.sampling, [name]: text } });
  return (
    <>
      <div class="grid">
        {FIELDS.map(({ name, label, ...rest }) => (
          <div key={name}>
            <label for={`${id}-${name}`}>{label}</label>
            <input
              id={`${id}-${name}`}
              type="number"
              inputMode="decimal"
              placeholder="default"
              value={values[name]}
              onInput={(event) => set(name, event.currentTarget.value)}
              {...rest}
            />
          </div>
        ))}
      </div>
      <label for={`${id}-stop`}>Stop strings, one a line</label>
      <textarea id={`${id}-stop`} rows={2} value={values.stop} onInput={(event) => set("stop", event.currentTarget.value)} />
      <button type="button" class="quiet" onClick={() => change({ sampling: NO_SAMPLING })}>
        Back to the defaults
      </button>
    </>
  );
}

interface JsonBoxProps {
  use: "useTools" | "useSchema";
  text: "tools" | "schema";
  kind: "array" | "object";
  switchLabel: string;
  boxLabel: string;
}

function JsonBox({ use, text, kind, switchLabel, boxLabel }: JsonBoxProps): JSX.Element {
  const id = useId();
  const values = settings.value;
  const wrong = values[use] ? jsonError(values[text], kind) : "";
  return (
    <>
      <label class="check">
        <input type="checkbox" checked={values[use]} onChange={(event) => change({ [use]: event.currentTarget.checked })} />
        {switchLabel}
      </label>
      <textarea
        class="code"
        rows={8}
        spellcheck={false}
        aria-label={boxLabel}
        aria-invalid={wrong !== ""}
        aria-describedby={wrong ? id : undefined}
        value={values[text]}
        onInput={(event) => change({ [text]: event.currentTarget.value })}
      />
      {wrong && (
        <p id={id} class="error">
          {wrong}
        </p>
      )}
    </>
  );
}

function ToolChoice(): JSX.Element {
  const id = useId();
  return (
    <div class="row">
      <label for={id}>Tool choice</label>
      <select
        id={id}
        value={settings.value.toolChoice}
        onChange={(event) => change({ toolChoice: event.currentTarget.value as Settings["toolChoice"] })}
      >
        <option value="auto">auto</option>
        <option value="required">required</option>
        <option value="none">none</option>
      </select>
    </div>
  );
}

/** The settings of requests: everything except the messages. */
export function Panel(): JSX.Element {
  const id = useId();
  void version.value;
  return (
    <div class="panel-body">
      <ModelChoice />
      <Key />
      <div>
        <label for={id}>System prompt</label>
        <textarea
          id={id}
          rows={3}
          value={shown.value.system}
          placeholder="none"
          onInput={(event) => setSystem(event.currentTarget.value)}
        />
      </div>
      <details open>
        <summary>Sampling</summary>
        <SamplingFields />
      </details>
      <details open={settings.value.useTools}>
        <summary>Tools</summary>
        {server.value.tools === false && <p class="note">The template of this model shows it no tools.</p>}
        <JsonBox use="useTools" text="tools" kind="array" switchLabel="Send tools" boxLabel="Tools, as JSON" />
        <ToolChoice />
      </details>
      <details open={settings.value.useSchema}>
        <summary>Form of the answer</summary>
        <JsonBox
          use="useSchema"
          text="schema"
          kind="object"
          switchLabel="Answers follow this JSON schema"
          boxLabel="JSON schema"
        />
      </details>
      <details open>
        <summary>Display</summary>
        <label class="check">
          <input
            type="checkbox"
            checked={settings.value.logprobs}
            onChange={(event) => change({ logprobs: event.currentTarget.checked })}
          />
          Colour tokens by probability
        </label>
        <p class="note">Asks for log-probabilities with the next answer.</p>
      </details>
    </div>
  );
}
