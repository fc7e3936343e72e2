/** Libraries that few texts need: each is loaded once something needs it, and used from then on. */

/** The address of a file of `vendor/`. @param {string} name */
export const addressOf = (name) => new URL(`./vendor/${name}`, import.meta.url).href;

/** @template T */
export class Library {
  /** @param {string} name */
  constructor(name) {
    this.name = name;
    /** @type {T | undefined} */
    this.own = undefined;
    this.isTried = false;
  }

  /** Never throws: what cannot be had is gone without. */
  async load() {
    this.own = await import(addressOf(this.name)).then((found) => found.default, () => undefined);
    this.isTried = true;
  }
}
