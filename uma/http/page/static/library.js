/** Libraries that few texts need: each is loaded once something needs it, and used from then on. */

/** The address of a file of `vendor/`. @param {string} name */
export const addressOf = (name) => new URL(`./vendor/${name}`, import.meta.url).href;

/** The only addresses that scripts and workers are made of. */
const policy = window.trustedTypes?.createPolicy("vendor", { createScriptURL: (name) => addressOf(name.replace(/[^\w.]/g, "")) });

/** The same, as browsers take it for a script. @param {string} name */
export const trusted = (name) => /** @type {string} */ (policy?.createScriptURL(name) ?? addressOf(name));

/** @template T */
export class Library {
  /** @param {string} name */
  constructor(name) {
    this.name = name;
    /** @type {T | undefined} */
    this.own = undefined;
    this.isTried = false;
  }

  /** Never throws: what cannot be had is gone without. A script that is no module leaves its global name. */
  async load() {
    const module = () => import(addressOf(this.name)).then((found) => found.default, () => undefined);
    this.own = await (this.name.endsWith(".js") ? globalOf(this.name.slice(0, -3)) : module());
    this.isTried = true;
  }
}

/** @param {string} name @returns {Promise<any>} */
function globalOf(name) {
  const script = document.createElement("script");
  script.src = trusted(`${name}.js`);
  document.head.append(script);
  return new Promise((resolve) => (script.onload = script.onerror = () => resolve(Reflect.get(window, name))));
}
