// A token, asked for when the service wants one.
import { $ } from "./drawing.js";
import { hasToken, useToken } from "./service.js";

/** Binds the dialog; `again` is called with a new token, or without one after signing out. */
export function bindLogin(again) {
  const dialog = $("login"), input = $("token"), sign = $("sign");
  const show = () => { sign.textContent = hasToken() ? "Sign out" : "Sign in…"; if (hasToken()) sign.hidden = false; };
  const close = () => { input.value = ""; dialog.close(); };
  sign.addEventListener("click", () => {
    if (!hasToken()) return askForToken("");
    useToken("");
    show();
    again();
  });
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const token = input.value.trim().replace(/^Bearer\s+/i, "");
    if (!/^[\x21-\x7e]{1,512}$/.test(token)) return complain("This is no token: it has 1 to 512 letters, digits and signs, and no spaces.");
    useToken(token);
    show();
    close();
    again();
  });
  dialog.querySelector("[value=cancel]").addEventListener("click", close);
  show();
}

function complain(text) {
  $("login-problem").hidden = !text;
  $("login-problem").textContent = text;
  $("token").focus();
}

/** Opens the dialog, with what the service said about the token that it was sent. */
export function askForToken(why) {
  $("sign").hidden = false;
  if (!$("login").open) $("login").showModal();
  complain(hasToken() ? why : "");
}
