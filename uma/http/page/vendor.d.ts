/** What the page's script uses of the libraries in static/vendor, each of which is one global name, or loaded where it is needed. */

declare namespace markdown {
  interface Token {
    type: string;
    tag: string;
    content: string;
    info: string;
    markup: string;
    level: number;
    nesting: number;
    map: [number, number] | null;
    children: Token[] | null;
    attrGet(name: string): string | null;
    attrs: [string, string][] | null;
  }
  interface StateInline {
    src: string;
    pos: number;
    posMax: number;
    push(type: string, tag: string, nesting: number): Token;
  }
  interface StateBlock {
    src: string;
    line: number;
    level: number;
    env: Env;
    blkIndent: number;
    bMarks: number[];
    eMarks: number[];
    tShift: number[];
    sCount: number[];
    isEmpty(line: number): boolean;
    getLines(begin: number, end: number, indent: number, keepLastLF: boolean): string;
    push(type: string, tag: string, nesting: number): Token;
  }
  /** The references that a text has defined, among others; `heading` is the level of the last one. */
  type Env = Record<string, unknown> & { heading: number };
  interface Parser {
    options: object;
    enable(names: string[]): Parser;
    disable(names: string[]): Parser;
    linkify: { set(options: object): void; add(schema: string, rule: null): Parser["linkify"] };
    core: { ruler: { after(name: string, own: string, rule: (state: { tokens: Token[]; env: Env }) => void): void } };
    inline: { ruler: { before(name: string, own: string, rule: (state: StateInline, silent: boolean) => boolean): void } };
    block: {
      ruler: {
        before(
          name: string,
          own: string,
          rule: (state: StateBlock, begin: number, end: number, silent: boolean) => boolean,
          options: { alt: string[] },
        ): void;
      };
    };
    renderer: {
      rules: Record<string, (tokens: Token[], index: number) => string>;
      render(tokens: Token[], options: object, env: Env): string;
    };
    utils: { escapeHtml(text: string): string };
    parse(text: string, env: Env): Token[];
  }
}

declare const markdownit: (preset: string, options: object) => markdown.Parser;

declare const DOMPurify: {
  setConfig(config: object): void;
  addHook(name: "afterSanitizeAttributes", run: (node: Element) => void): void;
  /** Text, which no HTML is made of, where the browser is too old for it. */
  sanitize(html: string): DocumentFragment | string;
};

interface Temml {
  render(source: string, into: Element, options: object): void;
}

interface Highlighter {
  getLanguage(name: string): object | undefined;
  highlight(code: string, options: { language: string; ignoreIllegals: boolean }): { value: string };
}

interface Window {
  /** Where the browser has it: what strings have to pass before they can be code. */
  trustedTypes?: {
    createPolicy(name: string, rules: { createScriptURL(text: string): string }): { createScriptURL(text: string): unknown };
  };
}
