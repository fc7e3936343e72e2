/** The shapes that the page's modules hand to each other, by global names. */

type Role = "user" | "assistant";

interface Attachment {
  name: string;
  text: string;
  /** Of a picture, whose text is empty: its file as a data URL. */
  image?: string;
  /** Of the text, where the server has counted them. */
  tokens?: number;
}

interface Usage {
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  /** Of these, the model's thinking. */
  reasoning_tokens?: number;
}

interface RequestMetrics {
  queue_ms: number;
  ttft_ms: number;
  decode_ms: number;
  tokens_per_second: number;
  batch_size: number;
}

interface Done {
  reason: "stop" | "length" | "cancelled" | "error";
  usage: Usage;
  metrics: RequestMetrics;
  /** Time that its model was loaded for, before the request was made. */
  loading_ms?: number;
  seed: number;
  warnings: string[];
  /** What the model was given in place of its oldest turns. */
  summary?: string;
}

interface Failure {
  code: string;
  message: string;
  retry_after_ms?: number | null;
  /** How much of the model is loaded, and that in words. */
  percent?: number;
  load?: string;
}

/** A token, its log probability, and the likeliest ones in its place. */
type TokenChance = [string, number, [string, number][]];

/** One turn. A conversation is a tree of them: an edited question and an answer made again are siblings of what they replace. */
interface Message {
  id: string;
  parent: string | null;
  role: Role;
  text: string;
  /** What the model thought before it answered; no part of `text`. */
  thinking?: string;
  /** Of the text, or of what was written after its beginning, where they were asked for. */
  tokens?: TokenChance[];
  /** The name of the model that was asked. */
  model?: string;
  /** When it was said, in milliseconds since 1970. */
  at: number;
  files?: Attachment[];
  /** The id of its request, by which the server can explain it for a while. */
  request?: string;
  done?: Done;
  failure?: Failure;
  /** The resume token while the answer is being written. */
  token?: string;
  /** Its beginning is another version's: what the server writes is appended. */
  continues?: boolean;
  /** The person has changed the model's words. */
  isEdited?: boolean;
  isImported?: boolean;
  /** With a token: the server is not known to have the question. */
  isUnsent?: boolean;
  /** Stopped before the server had told anything of it, or without its last word. */
  isStopped?: boolean;
  /** Tokens that it could have at most when it was asked for: the setting, or the server's own bound. */
  mostTokens?: number;
}

/** Only what differs from the server's defaults. */
type Sampling = Record<string, number | string[] | Record<string, any>>;

interface Settings {
  system: string;
  priority: -1 | 0 | 1;
  sampling: Sampling;
  /** A JSON Schema as it was typed, while it is no JSON. */
  unread?: string;
  /** How many are asked for at once; one, where nothing is said. */
  answers?: number;
  /** Off: a model that thinks is asked to answer at once. */
  reasoning?: "auto" | "off";
  /** A conversation that does not fit the context loses its oldest turns, or has a summary of them; else the person is asked. */
  truncation?: "auto" | "compact" | "off";
}

interface Conversation {
  id: string;
  title: string;
  updated: number;
  settings: Settings;
  /** Which of several it is held with; nothing: the server's default. */
  model?: string;
  messages: Record<string, Message>;
  /** It stands above all others. */
  pinned?: boolean;
  /** The last message of the branch that is shown. */
  leaf: string | null;
}

interface Bounds {
  default?: number;
  minimum: number;
  maximum?: number;
}

/** One of several models of a server. */
interface ListedModel {
  name: string;
  size_bytes: number;
  state: "unloaded" | "loading" | "loaded" | "leaving";
  /** How far its load is, in words. */
  load: string;
  /** Whether the server has the memory for it. */
  fits: boolean;
  /** Whether it sees pictures. */
  vision: boolean;
  /** False, too, where it is not known yet, as before its first load. */
  thinks: boolean;
  /** It has no chat template; as `thinks`. */
  is_base: boolean;
  quantization: string;
  parameters: number;
  context_length: number;
}

interface Info {
  server: string;
  /** Whether the server keeps one that this viewer can see. */
  history: boolean;
  /** Those that can be chosen, where there are several; `model` and what follows are of the one that was asked for. */
  models?: ListedModel[];
  model: {name: string, called: string, architecture: string, parameters: number, quantization: string, context_length: number, is_builtin: boolean};
  capabilities: {reasoning?: boolean, reasoning_switch?: boolean, chat?: boolean, vision?: boolean, max_answers?: number, max_logprobs?: number, grammars?: string[]};
  limits: {n_ctx: number, max_sequences: number, max_tokens: number, max_prompt_bytes: number, max_queue: number};
  sampling: Record<string, Bounds>;
}

interface RunningRequest {
  id: string;
  priority: number;
  prompt_tokens: number;
  cached_tokens: number;
  computed_tokens: number;
  generated_tokens: number;
  age_ms: number;
  /** Time from arrival to the first token, once there is one. */
  ttft_ms?: number | null;
  is_preempted: boolean;
  /** Why nothing of it is computed now: `slot`, `cells`, `prefix`, `prompt`, `reader`, or empty. */
  waits_for?: string;
  /** With `prompt`: the request that is read first. */
  behind?: string;
  /** Tells requests of one id apart. */
  number: number;
  /** For people: endpoint, key, program. */
  origin?: string;
  /** Of a server that has several. */
  model?: string;
}

interface Activity {
  running: RunningRequest[];
  /** The next ones of those that wait for a first slot; the counts are of all. */
  waiting?: RunningRequest[];
  waiting_interactive: number;
  waiting_normal: number;
  waiting_background: number;
}

/** Times in milliseconds. */
type Percentiles = {count: number, last: number, p50: number | null, p95: number | null, p99: number | null};

/** As `uma/metrics/live.py` defines them. */
interface Figures {
  /** Requests that have a slot. */
  running: number;
  waiting_interactive: number;
  waiting_normal: number;
  waiting_background: number;
  written_per_sec: number;
  read_per_sec: number;
  cached_share: number | null;
  first_token_ms: Percentiles | null;
  between_tokens_ms: Percentiles | null;
  /** Usual time until another slot is free. */
  slot_every_ms: number | null;
}

/** One of several models. */
interface LiveModel {
  name: string;
  /** None of one that is not loaded. */
  figures?: Figures;
  /** Numbers of its requests. */
  requests: number[];
  /** Of one that is loaded. */
  kv_cells_used?: number;
  kv_cells_total?: number;
  /** Of one that is not loaded: how far it is, and how many requests wait for that. */
  load?: string;
  waiting?: number;
}

interface Frame {
  at_ms: number;
  figures: Figures;
  /** Of several models those that are loaded, or waited for. */
  models: LiveModel[];
  metrics: Record<string, any>;
  activity: Activity;
}

/** Of a stream. */
interface ServerEvent {
  id: string;
  name: string;
  data: any;
}

/** How far an answer is that has no text yet. */
interface Progress {
  prompt_tokens?: number;
  computed_tokens?: number;
  /** See `RunningRequest`. */
  waits_for?: string;
  /** Tokens of the prompt that is read first. */
  unread_before?: number;
  /** Requests that begin before it. */
  ahead?: number;
  /** How much of its model is loaded, where it waits for that, and that in words. */
  loading_percent?: number;
  load?: string;
}

/** What a message asks its conversation to do. */
interface Actions {
  resend(message: Message, text: string, files: Attachment[]): void;
  again(message: Message): void;
  /** The question above. */
  edit(message: Message): void;
  /** Have the model go on with it. */
  goOn(message: Message): void;
  /** Put the person's words in its place. */
  amend(message: Message, text: string, goesOn: boolean): void;
  /** Ask again without the oldest turns, or with a summary of them. */
  outgrow(message: Message, truncation: Settings["truncation"]): void;
  branchOff(message: Message): void;
  /** Tokens that the model can read. */
  mostTokens(): number;
  info(): Info | undefined;
  count(text: string): Promise<number | undefined>;
  /** Show all answers to its question, side by side. */
  compare(message: Message): void;
  isCompared(message: Message): boolean;
  /** Whether the conversation, as it is shown, goes on from it. */
  goesOn(message: Message): boolean;
  /** A new chat. */
  begin(): void;
  /** Most of what the model was given for this answer stands before the question. */
  isOutgrown(message: Message): boolean;
  show(id: string): void;
}

/** A message that is being written. */
interface Draft {
  text: string;
  files: Attachment[];
  /** It is sent once the answer ends. */
  isQueued?: true;
}

/** What can be done with a request of one's own: to end it, to end its thinking. */
interface Own {
  /** Of an answer of this page's. */
  title?: string;
  stop(): Promise<void> | void;
  hurry?: () => void;
  /** How it has ended, in words. */
  howEnded?: () => Promise<string>;
}

/** Of the palette; those of one group follow on each other. */
interface Entry {
  group: string;
  label: string;
  /** Other words by which it is found. */
  also?: string;
  note?: string;
  state?: string;
  isCurrent?: boolean;
  isDisabled?: boolean;
  run(): void;
}

/** What can be done with a conversation. */
interface Act {
  label: string;
  icon?: string;
  isDanger?: boolean;
  /** Null: its name is shown above it. */
  run(shown: HTMLElement | null): void;
}
