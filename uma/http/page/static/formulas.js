/** Formulas as MathML, from the part of LaTeX that models write. Pure but for the elements it makes. A formula with a
 * command that is not known here, or one that is not well formed, stays the text that it is. */

import { LETTERS, OPERATORS, SYMBOLS } from "./symbols.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_CHARS = 4_096;
const MAX_DEPTH = 40;
const TOKEN = /\\[a-zA-Z]+\*?|\\[^]|[0-9]+(?:[.,][0-9]+)*|\s+|[^]/g;

/** Pairs around a matrix. @type {Record<string, [string, string]>} */
const MATRICES = {
  matrix: ["", ""],
  smallmatrix: ["", ""],
  pmatrix: ["(", ")"],
  bmatrix: ["[", "]"],
  Bmatrix: ["{", "}"],
  vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"],
  array: ["", ""],
  cases: ["{", ""],
};
const ALIGNED = ["aligned", "align", "align*", "alignat", "split", "gathered", "gather", "gather*", "equation", "equation*"];
/** @type {Record<string, string>} */
const ACCENTS = {
  hat: "^", widehat: "^", bar: "¯", overline: "¯", tilde: "~", widetilde: "~", vec: "→", dot: "˙", ddot: "¨",
  overrightarrow: "→", check: "ˇ", overbrace: "⏞",
}; // prettier-ignore
/** @type {Record<string, string>} */
const UNDER = { underline: "_", underbrace: "⏟" };
/** Widths of spaces in em. @type {Record<string, number>} */
const SPACES = { ",": 0.167, ":": 0.222, ">": 0.222, ";": 0.278, "!": -0.167, " ": 0.333, quad: 1, qquad: 2, enspace: 0.5 };
const TEXTS = ["text", "textrm", "textbf", "textit", "textsf", "texttt", "mbox", "operatorname", "operatorname*"];
/** What changes nothing here. */
const IGNORED = ["displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "nonumber", "notag", "big", "Big", "bigg",
  "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "middle", "hline"]; // prettier-ignore

class NotUnderstood extends Error {}

/** @param {string} tag @param {Record<string, string | undefined>} attributes @param {...(Node | string)} children */
function m(tag, attributes, ...children) {
  const element = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A formula with its signs around it, as the server leaves it. @param {string} source @returns {Element | null} Null: it is not understood. */
export function typeset(source) {
  const isBlock = source.startsWith("$$") || source.startsWith("\\[");
  const ends = source.startsWith("$") && !isBlock ? 1 : 2;
  const inner = source.slice(ends, -ends);
  if (inner.length > MAX_CHARS) return null;
  try {
    const reader = new Reader(inner.match(TOKEN) ?? [], isBlock);
    const row = reader.row();
    if (reader.peek() !== undefined) return null;
    const attributes = isBlock ? { display: "block" } : {};
    return m("math", attributes, row);
  } catch (error) {
    if (error instanceof NotUnderstood) return null;
    throw error;
  }
}

/** Beside a function's name, in em. */
const THIN = 0.1667;

class Reader {
  /** @param {string[]} tokens @param {boolean} isBlock */
  constructor(tokens, isBlock) {
    this.tokens = tokens;
    this.isBlock = isBlock;
    this.at = 0;
    this.depth = 0;
    /** Within the square brackets of a root. */
    this.isOptional = false;
  }

  /** The next token that is no space. @returns {string | undefined} */
  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at];
  }

  /** @param {string} [wanted] */
  next(wanted) {
    const token = this.peek();
    if (token === undefined || (wanted && token !== wanted)) throw new NotUnderstood(wanted);
    this.at++;
    return token;
  }

  /** All up to what ends a group, a cell or a pair of brackets. */
  row() {
    if (++this.depth > MAX_DEPTH) throw new NotUnderstood("depth");
    const row = m("mrow", {});
    for (let token = this.peek(); token !== undefined && !this.ends(token); token = this.peek()) {
      const isOperator = this.isOperator(token);
      const atom = this.scripted();
      if (!atom) continue;
      // "n log n", and not "nlogn": a function's name stands off from letters and numbers, not from brackets and signs.
      if (isOperator && isLetterlike(row.lastElementChild)) row.append(space(THIN));
      row.append(atom);
      if (isOperator && !/^[([|^_),.;=+<>-]$/.test(this.peek() ?? ")") && !this.ends(this.peek() ?? "}")) row.append(space(THIN));
    }
    this.depth--;
    return row;
  }

  /** @param {string} token */
  isOperator(token) {
    return token.startsWith("\\") && (OPERATORS.includes(token.slice(1)) || token.startsWith("\\operatorname"));
  }

  /** @param {string} token */
  ends(token) {
    return token === "}" || token === "&" || token === "\\\\" || token === "\\right" || token === "\\end" ||
      (token === "]" && this.isOptional); // prettier-ignore
  }

  /** An atom with what stands below and above it. */
  scripted() {
    const token = this.peek() ?? "";
    const base = token === "^" || token === "_" ? m("mrow", {}) : this.atom();
    if (!base) return null;
    /** @type {Element | undefined} */
    let below;
    /** @type {Element | undefined} */
    let above;
    for (;;) {
      const mark = this.peek();
      if (mark === "_" && !below) {
        this.at++;
        below = this.argument();
      } else if (mark === "^" && !above) {
        this.at++;
        above = this.argument();
      } else if (mark === "'" && !above) {
        let primes = "";
        for (; this.peek() === "'"; this.at++) primes += "′";
        above = m("mo", {}, primes);
        if (this.peek() === "^") {
          this.at++;
          above = m("mrow", {}, above, this.argument());
        }
      } else if (mark === "\\limits" || mark === "\\nolimits") this.at++;
      else break;
    }
    const isStacked = (this.isBlock && base.hasAttribute("data-limits")) || base.hasAttribute("data-brace");
    const [sub, sup, both] = isStacked ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (below && above) return m(both, {}, base, below, above);
    return below ? m(sub, {}, base, below) : above ? m(sup, {}, base, above) : base;
  }

  /** What a command is applied to: a group, or one atom. */
  argument() {
    if (this.peek() === "{") return this.group();
    const atom = this.atom();
    if (!atom) throw new NotUnderstood("argument");
    return atom;
  }

  group() {
    this.next("{");
    const was = this.isOptional;
    this.isOptional = false;
    const row = this.row();
    this.isOptional = was;
    this.next("}");
    return row;
  }

  /** A group's letters as they stand. */
  raw() {
    this.next("{");
    let text = "";
    for (let open = 1; ; this.at++) {
      const token = this.tokens[this.at];
      if (token === undefined) throw new NotUnderstood("text");
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
      if (!open) break;
      text += /^\\[^a-zA-Z]$/.test(token) ? token.slice(1) : token;
    }
    this.at++;
    return text;
  }

  /** @returns {Element | null} Null: nothing to be seen. */
  atom() {
    const token = this.next();
    if (token === "{") {
      this.at--;
      return this.group();
    }
    if (/^[0-9]/.test(token)) return m("mn", {}, token);
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/^\p{L}$/u.test(token)) return m("mi", {}, token);
    if (token === "~") return space(SPACES[" "]);
    if ("}^_&#%$".includes(token)) throw new NotUnderstood(token);
    return sign(token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  /** @param {string} name @returns {Element | null} */
  command(name) {
    if (Object.hasOwn(SYMBOLS, name)) return sign(SYMBOLS[name]);
    if (Object.hasOwn(LETTERS, name)) return m("mi", {}, LETTERS[name]);
    if (OPERATORS.includes(name)) return operator(name);
    if (Object.hasOwn(SPACES, name)) return space(SPACES[name]);
    if (TEXTS.includes(name)) {
      const text = this.raw();
      return name.startsWith("operatorname") ? operator(text) : m("mtext", {}, text);
    }
    if (IGNORED.includes(name)) return null;
    if ("{}%$&#_".includes(name)) return sign(name);
    if (name === "|") return sign("‖");
    if (Object.hasOwn(ACCENTS, name)) return this.marked("mover", name, ACCENTS[name]);
    if (Object.hasOwn(UNDER, name)) return this.marked("munder", name, UNDER[name]);
    if (Object.hasOwn(STYLES, name)) return styled(this.argument(), STYLES[name]);
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return m("mfrac", {}, this.argument(), this.argument());
      case "binom":
      case "dbinom":
        return fenced("(", m("mfrac", { linethickness: "0" }, this.argument(), this.argument()), ")");
      case "sqrt":
        return this.root();
      case "left":
        return this.brackets();
      case "begin":
        return this.environment(this.raw());
      case "boxed":
        return m("mrow", { class: "boxed" }, this.argument());
      case "stackrel":
      case "overset": {
        const above = this.argument();
        return m("mover", {}, this.argument(), above);
      }
      case "underset": {
        const below = this.argument();
        return m("munder", {}, this.argument(), below);
      }
      case "not":
        return sign(`${this.argument().textContent}\u0338`);
      case "pmod":
        return m("mrow", {}, space(1), fenced("(", m("mrow", {}, operator("mod"), space(0.3), this.argument()), ")"));
      case "tag":
        return m("mtext", {}, `\u2003(${this.raw()})`);
      default:
        throw new NotUnderstood(name);
    }
  }

  /** @param {string} tag @param {string} name @param {string} mark */
  marked(tag, name, mark) {
    const isBrace = name.endsWith("brace");
    const isWide = isBrace || /^(wide|over|under)/.test(name);
    const found = m(tag, { accent: "true" }, this.argument(), m("mo", { stretchy: String(isWide) }, mark));
    if (isBrace) found.setAttribute("data-brace", "");
    return found;
  }

  root() {
    if (this.peek() !== "[") return m("msqrt", {}, this.argument());
    this.at++;
    const was = this.isOptional;
    this.isOptional = true;
    const degree = this.row();
    this.isOptional = was;
    this.next("]");
    return m("mroot", {}, this.argument(), degree);
  }

  brackets() {
    const open = this.bracket();
    const row = this.row();
    this.next("\\right");
    return fenced(open, row, this.bracket());
  }

  bracket() {
    const token = this.next();
    if (token === ".") return "";
    if (!token.startsWith("\\")) return token;
    const name = token.slice(1);
    if ("{}".includes(name)) return name;
    if (name === "|") return "‖";
    if (!Object.hasOwn(SYMBOLS, name)) throw new NotUnderstood(name);
    return SYMBOLS[name];
  }

  /** @param {string} name */
  environment(name) {
    const isAligned = ALIGNED.includes(name);
    if (!isAligned && !Object.hasOwn(MATRICES, name)) throw new NotUnderstood(name);
    if (name === "array" || name === "alignat") this.raw(); // how its columns stand
    const table = m("mtable", isAligned ? { class: "aligned", displaystyle: "true" } : name === "cases" ? { class: "cases" } : {});
    let line = m("mtr", {});
    for (;;) {
      line.append(m("mtd", {}, this.row()));
      const token = this.next();
      if (token === "&") continue;
      if (line.textContent) table.append(line);
      line = m("mtr", {});
      if (token === "\\end") break;
      if (token !== "\\\\") throw new NotUnderstood(token);
    }
    if (this.raw() !== name) throw new NotUnderstood(name);
    const [open, close] = MATRICES[name] ?? ["", ""];
    return open || close ? fenced(open, table, close) : table;
  }
}

/** @param {string} text */
function sign(text) {
  const attributes = "∑∏∐⋃⋂⋁⋀⨁⨂".includes(text) ? { "data-limits": "" } : {};
  // A bracket is as high as a line, unless it is one of a pair that says otherwise.
  return m("mo", { ...attributes, ...("()[]{}|‖⟨⟩⌊⌋⌈⌉/".includes(text) && { stretchy: "false" }) }, text);
}

/** @param {string} name A function's, upright. */
function operator(name) {
  const hasLimits = ["lim", "max", "min", "sup", "inf", "limsup", "liminf", "argmax", "argmin", "gcd", "det", "Pr"].includes(name);
  return m("mi", { mathvariant: "normal", ...(hasLimits && { "data-limits": "" }) }, name);
}

/** Whether it is more than a sign or a space. @param {Element | null} element */
function isLetterlike(element) {
  return element !== null && !["mo", "mspace"].includes(element.localName);
}

/** @param {number} em */
function space(em) {
  return m("mspace", { width: `${em}em` });
}

/** @param {string} open @param {Element} inner @param {string} close */
function fenced(open, inner, close) {
  const bracket = (/** @type {string} */ text) => m("mo", { stretchy: "true", fence: "true" }, text);
  return m("mrow", {}, ...(open ? [bracket(open)] : []), inner, ...(close ? [bracket(close)] : []));
}

/** Where the letters of a style are among Unicode's mathematical ones: A, a, 0; and those that were there before. @type {Record<string, {upper: number, lower?: number, digit?: number, odd?: string}>} */
const ALPHABETS = {
  bold: { upper: 0x1d400, lower: 0x1d41a, digit: 0x1d7ce },
  double: { upper: 0x1d538, lower: 0x1d552, digit: 0x1d7d8, odd: "CℂHℍNℕPℙQℚRℝZℤ" },
  script: { upper: 0x1d49c, odd: "BℬEℰFℱHℋIℐLℒMℳRℛ" },
  fraktur: { upper: 0x1d504, lower: 0x1d51e, odd: "CℭHℌIℑRℜZℨ" },
};
/** @type {Record<string, string>} */
const STYLES = {
  mathbf: "bold", boldsymbol: "bold", bm: "bold", mathbb: "double", mathcal: "script", mathscr: "script",
  mathfrak: "fraktur", mathrm: "upright", mathit: "", mathsf: "upright", mathtt: "upright", rm: "upright",
}; // prettier-ignore

/** @param {Element} element @param {string} style */
function styled(element, style) {
  for (const each of element.matches("mi, mn") ? [element] : element.querySelectorAll("mi, mn")) {
    if (style === "upright") each.setAttribute("mathvariant", "normal");
    else if (style) each.textContent = [...(each.textContent ?? "")].map((sign) => inAlphabet(sign, style)).join("");
  }
  return element;
}

/** @param {string} sign @param {string} style */
function inAlphabet(sign, style) {
  const { upper, lower, digit, odd = "" } = ALPHABETS[style];
  const signs = [...odd];
  const at = signs.indexOf(sign);
  if (at >= 0) return signs[at + 1];
  const code = sign.charCodeAt(0);
  const place = (/** @type {number | undefined} */ base, /** @type {string} */ first) =>
    base === undefined ? sign : String.fromCodePoint(base + code - first.charCodeAt(0));
  if (/^[A-Z]$/.test(sign)) return place(upper, "A");
  if (/^[a-z]$/.test(sign)) return place(lower, "a");
  return /^[0-9]$/.test(sign) ? place(digit, "0") : sign;
}
