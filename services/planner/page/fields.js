// Inputs bound to fields of an object by `data-field`, and what is wrong with a field shown beside its input.
import { GIB, html } from "./drawing.js";
import { setAt, valueAt } from "./request.js";
import { quantity } from "./tables_text.js";

const inputs = (root) => [...root.querySelectorAll("[data-field]")];

/** What an input says; `undefined` where it is left open. Throws an `Error` for JSON that is none. */
export function reading(input) {
  if (input.type === "checkbox") return input.checked;
  const text = input.value.trim();
  if (text === "") return input.dataset.empty === "null" ? null : undefined;
  if ("json" in input.dataset) return JSON.parse(text);
  if ("text" in input.dataset) return text;
  if ("list" in input.dataset) return [text];
  const value = quantity(text);
  if (input.dataset.unit !== "gib" || typeof value !== "number") return value;
  // Larger numbers would not arrive as they are: the service is told what was written.
  return Number.isSafeInteger(Math.round(value * GIB)) ? Math.round(value * GIB) : `${text} GiB`;
}

/** Shows in an input what a field holds. */
export function writing(input, value) {
  if (input.type === "checkbox") input.checked = value ?? input.defaultChecked;
  else if ("json" in input.dataset) input.value = value === undefined ? "" : JSON.stringify(value);
  else if (Array.isArray(value)) choose(input, value.join("|"));
  else if (input.tagName === "SELECT") choose(input, value === undefined ? "" : String(value));
  else if (input.dataset.unit === "gib" && typeof value === "number") input.value = String(Number((value / GIB).toFixed(3)));
  else input.value = value ?? "";
}

/** Chooses a value in a select, which it gets first if it has not been there. */
export function choose(select, value) {
  if (![...select.options].some((option) => option.value === value)) select.append(html("option", { value }, value));
  select.value = value;
}

/** Shows in all inputs of `root` what the object holds. */
export function showFields(root, object, skip = () => false) {
  for (const input of inputs(root)) if (!skip(input)) writing(input, valueAt(object, input.dataset.field));
}

/** Takes one input's value into the object; false where it cannot be read, which is shown beside it. */
export function takeField(input, object) {
  try {
    setAt(object, input.dataset.field, reading(input));
  } catch (error) {
    showError(input, `This is no JSON: ${error.message}`);
    return false;
  }
  showError(input, "");
  return true;
}

/** Shows what is wrong with an input beside it; nothing where the text is empty. */
export function showError(input, text) {
  const id = `${input.id || `${input.closest("dialog")?.id}-${input.dataset.field}`}-error`;
  let note = document.getElementById(id);
  if (!text) {
    note?.remove();
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
    return;
  }
  if (!note) {
    note = html("span", { id, class: "error" });
    (input.closest("label") ?? input).after(note);
  }
  note.textContent = text;
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-describedby", id);
}

/** Takes all notes of errors below `root` away. */
export function clearErrors(root) {
  for (const input of inputs(root)) showError(input, "");
}

/**
 * Shows each error beside the input of its field, or of the field that holds it.
 *
 * @param errors The service's: field, value, problem and remedy.
 * @param prefix What the fields of `root` are called in the request, such as `tables[3].`.
 * @returns Those that have no input here.
 */
export function showErrors(root, errors, prefix = "") {
  return errors.filter((error) => {
    if (!error.field.startsWith(prefix)) return true;
    const field = error.field.slice(prefix.length);
    const holds = inputs(root).filter((input) => field === input.dataset.field || (field.startsWith(input.dataset.field) && /[.[]/.test(field[input.dataset.field.length])));
    const input = holds.filter((one) => one.offsetParent !== null).sort((a, b) => b.dataset.field.length - a.dataset.field.length)[0];
    if (!input) return true;
    showError(input, sentence(error));
    return false;
  });
}

/** An error in words. */
export const sentence = (error) => `${error.field}: ${error.problem} (got ${error.value}); ${error.remedy}`;
