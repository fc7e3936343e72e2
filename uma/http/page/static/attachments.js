/** Files beside a message that is being written: each with its name and a way to take it away. */

import { h, icon, iconButton } from "./dom.js";

/** @typedef {import("./types.js").Attachment} Attachment */

/** Show `files` in `list`. @param {HTMLElement} list @param {Attachment[]} files @param {(file: Attachment) => void} remove */
export function showFiles(list, files, remove) {
  const items = files.map((file) =>
    h(
      "li",
      { class: "file" },
      icon("file"),
      file.name,
      iconButton("x", `Remove ${file.name}`, () => remove(file), "small"),
    ),
  );
  list.replaceChildren(...items);
  list.hidden = !items.length;
}
