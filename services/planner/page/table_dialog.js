// Editing one table, or all of them; what the service says about a field stands beside its input.
import { $, show } from "./drawing.js";
import { clearErrors, reading, sentence, showError, showErrors, showFields, takeField } from "./fields.js";

const fieldsOf = (dialog) => [...dialog.querySelectorAll("[data-field]")];

/** Opens the dialog for one table; `actions` are `apply(table)`, which gives the problem or null, `remove()`, `cancel()` and `closed()`. */
export function editTable(table, index, isNew, actions) {
  const dialog = $("table-dialog"), form = dialog.querySelector("form"), kind = $("kind");
  const note = form.querySelector(".problem"), submit = form.querySelector("[type=submit]");
  const measured = () => {
    $("zipf").hidden = kind.value !== "zipf";
    $("measured").hidden = kind.value === "zipf";
  };
  const say = (text) => { note.hidden = !text; note.textContent = text; };
  $("table-title").textContent = isNew ? "Add a table" : `Table ${table.name ?? index}`;
  form.querySelector("[value=remove]").hidden = isNew;
  clearErrors(form);
  say("");
  showFields(form, table);
  kind.value = !table.access || table.access.kind === "zipf" ? "zipf" : "json";
  measured();
  kind.onchange = measured;
  form.onsubmit = async (event) => {
    event.preventDefault();
    const edited = structuredClone(table);
    const skipped = kind.value === "zipf" ? "access" : "access.exponent";
    if (kind.value === "zipf") delete edited.access;
    const taken = fieldsOf(form).filter((input) => input.dataset.field !== skipped && !untouched(input, table)).map((input) => takeField(input, edited));
    if (taken.includes(false)) return;
    if (edited.access && kind.value === "zipf") edited.access = edited.access.exponent === undefined ? undefined : { kind: "zipf", ...edited.access };
    for (const name of Object.keys(edited)) if (edited[name] === undefined) delete edited[name];
    submit.disabled = true;
    submit.textContent = "Planning…";
    const problem = await actions.apply(edited);
    submit.disabled = false;
    submit.textContent = "Apply";
    if (!dialog.open) return;
    const own = (problem?.errors ?? []).filter((error) => error.field.startsWith(`tables[${index}]`));
    if (!own.length) return dialog.close();
    clearErrors(form);
    say(showErrors(form, own, `tables[${index}].`).map(sentence).join("\n"));
    form.querySelector("[aria-invalid]")?.focus();
  };
  form.querySelector("[value=remove]").onclick = () => { dialog.close(); actions.remove(); };
  form.querySelector("[value=cancel]").onclick = () => { dialog.close(); actions.cancel(); };
  dialog.oncancel = () => actions.cancel();
  dialog.onclose = () => actions.closed();
  dialog.showModal();
  form.querySelector("[data-field=name]").select();
}

/** Whether a tick box stands as the field that is not given: it need not be given then. */
const untouched = (input, table) => input.type === "checkbox" && !(input.dataset.field in table) && input.checked === input.defaultChecked;

/** Opens the dialog that changes all tables; `apply` gets what to change of a table. */
export function editAll(apply) {
  const dialog = $("all-dialog"), form = dialog.querySelector("form");
  form.reset();
  clearErrors(form);
  form.onsubmit = (event) => {
    event.preventDefault();
    const [optimizer, data_type, exponent, unpin] = fieldsOf(form).map(reading);
    const input = form.querySelector("[data-field=exponent]");
    if (exponent !== undefined && typeof exponent !== "number") return showError(input, "exponent: is no number; give one such as 1.05");
    dialog.close();
    apply((table) => {
      const changed = { ...table, ...(optimizer && { optimizer }), ...(data_type && { data_type }) };
      if (exponent !== undefined) changed.access = { kind: "zipf", exponent };
      if (unpin) { delete changed.modes; delete changed.ratio; }
      return changed;
    });
  };
  form.querySelector("[value=cancel]").onclick = () => dialog.close();
  dialog.showModal();
}

/** Fills the select of shardings with what the service knows. */
export function setShardings(names) {
  const select = $("table-dialog").querySelector("[data-field=sharding]");
  show(select, new Option("row_wise (default)", ""), ...names.map((name) => new Option(name, name)));
}
