/** Pictures beside a message: scaled down in this browser before they are sent and kept, shown small, and large on a click. */

import { byId, h } from "./dom.js";

/** Maximum side of a picture: more than that few models see, and the browser has to keep it. */
const MAX_SIDE_PX = 1_536;
/** Maximum length of a PNG as a data URL; what would be longer is a JPEG, a fifth of that as a rule. */
const MAX_PNG_CHARS = 400_000;
const JPEG_QUALITY = 0.85;
/** What `pictureOf` makes: nothing else is shown, sent or imported. */
const FORM = /^data:image\/(?:png|jpeg);base64,[A-Za-z0-9+/]+={0,2}$/;

/** Whether a file is a picture by its kind. SVG is text. @param {File} file */
export function isPicture({ type }) {
  return type.startsWith("image/") && type !== "image/svg+xml";
}

/** A picture's file as the data URL that is sent and kept; null where the browser cannot read it. @param {File} file @returns {Promise<string | null>} */
export async function pictureOf(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return null;
  const scale = Math.min(1, MAX_SIDE_PX / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(scale * bitmap.width));
  canvas.height = Math.max(1, Math.round(scale * bitmap.height));
  const context = canvas.getContext("2d");
  if (!context) return null;
  context.fillStyle = "white"; // what is transparent is white to the person, and would be black to the model
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  // Letters and lines stay sharp in a PNG; a photograph is no better for it.
  const png = file.type === "image/jpeg" ? "" : canvas.toDataURL("image/png");
  const made = png && png.length <= MAX_PNG_CHARS ? png : canvas.toDataURL("image/jpeg", JPEG_QUALITY);
  return FORM.test(made) ? made : null;
}

/** Whether this can stand beside a message: a text with its name, or a picture with its. @param {any} file @returns {file is Attachment} */
export function isAttachment(file) {
  const { name, text, image } = file ?? {};
  return typeof name === "string" && typeof text === "string" && (image === undefined || FORM.test(String(image)));
}

/** A picture as the server takes it. @param {string} image */
export function fileOf(image) {
  return { data: image.slice(image.indexOf(",") + 1) };
}

/** A picture, small. @param {Attachment} file */
export function thumbnail({ name, image }) {
  return h("img", { class: "thumbnail", src: image, alt: `Picture: ${name}` });
}

/** A file beside a question, as a button that shows the picture large, or the text that the model is given. @param {Attachment} file @param {...Node} label */
export function openable(file, ...label) {
  const open = () => {
    const text = { class: "file-text", dir: "auto", tabindex: 0, role: "region", "aria-label": "Text" };
    const large = file.image ? h("img", { src: file.image, alt: `Picture: ${file.name}` }) : h("pre", text, file.text);
    byId("picture-shown", HTMLElement).replaceChildren(large);
    byId("picture-name", HTMLElement).textContent = file.name;
    byId("picture", HTMLDialogElement).showModal();
  };
  return h("button", { type: "button", class: file.image ? "picture" : "file", title: `Show ${file.name}`, onclick: open }, ...label);
}
