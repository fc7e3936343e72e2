/**
 * The shapes that the page's modules hand to each other. Types only: nothing here runs.
 *
 * @typedef {"user" | "assistant"} Role
 *
 * @typedef {object} Attachment
 * @property {string} name
 * @property {string} text
 * @property {string} [image] Of a picture, whose text is empty: its file as a data URL.
 *
 * @typedef {object} Usage
 * @property {number} prompt_tokens
 * @property {number} cached_tokens
 * @property {number} completion_tokens
 * @property {number} [reasoning_tokens] Of these, the model's thinking.
 *
 * @typedef {object} RequestMetrics
 * @property {number} queue_ms
 * @property {number} ttft_ms
 * @property {number} decode_ms
 * @property {number} tokens_per_second
 * @property {number} batch_size
 *
 * @typedef {object} Done
 * @property {"stop" | "length" | "cancelled" | "error"} reason
 * @property {Usage} usage
 * @property {RequestMetrics} metrics
 * @property {number} seed
 * @property {string[]} warnings
 *
 * @typedef {object} Failure
 * @property {string} code
 * @property {string} message
 * @property {number | null} [retry_after_ms]
 * @property {number} [percent] How much of the model is loaded.
 *
 * @typedef {[string, number, [string, number][]]} TokenChance A token, its log probability, and the likeliest ones in its place.
 *
 * @typedef {object} Message One turn. A conversation is a tree of them: an edited question and an answer made again
 *   are siblings of what they replace.
 * @property {string} id
 * @property {string | null} parent
 * @property {Role} role
 * @property {string} text
 * @property {string} [thinking] What the model thought before it answered; no part of `text`.
 * @property {TokenChance[]} [tokens] Of the text, or of what was written after its beginning, where they were asked for.
 * @property {string} [model] The name of the model that was asked.
 * @property {number} at When it was said, in milliseconds since 1970.
 * @property {Attachment[]} [files]
 * @property {string} [request] The id of its request, by which the server can explain it for a while.
 * @property {Done} [done]
 * @property {Failure} [failure]
 * @property {string} [token] The resume token while the answer is being written.
 * @property {boolean} [continues] Its beginning is another version's: what the server writes is appended.
 * @property {boolean} [isEdited] The person has changed the model's words.
 * @property {boolean} [isUnsent] With a token: the server is not known to have the question.
 * @property {boolean} [isStopped] Stopped before the server had told anything of it, or without its last word.
 * @property {number | null} [mostTokens] What the settings allowed at most when it was asked for; null: they said nothing.
 *
 * @typedef {Record<string, number | string[] | Record<string, any>>} Sampling Only what differs from the server's defaults.
 *
 * @typedef {object} Settings
 * @property {string} system
 * @property {-1 | 0 | 1} priority
 * @property {Sampling} sampling
 * @property {number} [answers] How many are asked for at once; one, where nothing is said.
 * @property {"auto" | "off"} [reasoning] Off: a model that thinks is asked to answer at once.
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} updated
 * @property {Settings} settings
 * @property {string} [model] Which of several it is held with; nothing: the server's default.
 * @property {Record<string, Message>} messages
 * @property {boolean} [pinned] It stands above all others.
 * @property {string | null} [from] The first message that the model is still given; nothing: all are.
 * @property {number} [fromAt] Since when, in milliseconds since 1970.
 * @property {string} [summary] What it is given in place of the messages before that one.
 * @property {{from?: string | null, fromAt?: number, summary?: string}} [before] The same before the last change, which can be undone.
 * @property {string | null} leaf The last message of the branch that is shown.
 *
 * @typedef {object} Range
 * @property {number} [default]
 * @property {number} minimum
 * @property {number} [maximum]
 *
 * @typedef {object} ListedModel One of several models of a server.
 * @property {string} name
 * @property {number} size_bytes
 * @property {"unloaded" | "loading" | "loaded" | "leaving"} state
 * @property {number | null} loading_percent
 * @property {boolean} fits Whether the server has the memory for it.
 * @property {boolean} vision Whether it sees pictures.
 * @property {boolean} thinks False, too, where it is not known yet, as before its first load.
 * @property {boolean} is_base It has no chat template; as `thinks`.
 * @property {string} quantization
 * @property {number} parameters
 * @property {number} context_length
 *
 * @typedef {object} Info
 * @property {string} server
 * @property {ListedModel[]} [models] Those that can be chosen, where there are several; `model` and what follows are of the one that was asked for.
 * @property {{name: string, called: string, architecture: string, parameters: number, quantization: string, context_length: number,
 *   is_builtin: boolean}} model
 * @property {{reasoning?: boolean, reasoning_switch?: boolean, chat?: boolean, vision?: boolean, max_answers?: number, max_logprobs?: number, grammars?: string[]}} capabilities
 * @property {{n_ctx: number, max_sequences: number, max_tokens: number, max_prompt_bytes: number, max_queue: number}} limits
 * @property {Record<string, Range>} sampling
 *
 * @typedef {object} RunningRequest
 * @property {string} id
 * @property {number} priority
 * @property {number} prompt_tokens
 * @property {number} cached_tokens
 * @property {number} computed_tokens
 * @property {number} generated_tokens
 * @property {number} age_ms
 * @property {boolean} is_preempted
 * @property {string} [waits_for] Why nothing of it is computed now: `slot`, `cells`, `prefix`, `prompt`, `reader`, or empty.
 * @property {string} [behind] With `prompt`: the request that is read first.
 * @property {string} [origin] For people: endpoint, key, program.
 *
 * @typedef {object} Activity
 * @property {RunningRequest[]} running
 * @property {RunningRequest[]} [waiting] The next ones of those that wait for a first slot; the counts are of all.
 * @property {number} waiting_interactive
 * @property {number} waiting_normal
 * @property {number} waiting_background
 *
 * @typedef {{count: number, p50: number, p95: number, p99: number}} Percentiles Times in milliseconds.
 *
 * @typedef {object} Figures As `uma/metrics/live.py` defines them.
 * @property {number} running Requests that have a slot.
 * @property {number} waiting_interactive
 * @property {number} waiting_normal
 * @property {number} waiting_background
 * @property {number} written_per_sec
 * @property {number} read_per_sec
 * @property {number | null} cached_share
 * @property {Percentiles | null} first_token_ms
 * @property {Percentiles | null} between_tokens_ms
 * @property {number | null} slot_every_ms Usual time until another slot is free.
 *
 * @typedef {object} Frame
 * @property {number} at_ms
 * @property {Figures} figures
 * @property {Record<string, any>} metrics
 * @property {Activity} activity
 */

export {};
