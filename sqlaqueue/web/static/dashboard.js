// What the dashboard does beyond its pages: live updates, times in the reader's zone, keys, selections, copying.
// Every page is complete without this file. It is loaded with `defer`, and has no inline style, eval or innerHTML.
//
// Attributes that it reads:
//   data-events="URL"     on <body>: the stream of server-sent events
//   data-live             on a <section id>: replaced by the section of the same id when something has changed
//   id="live-status"      where the state of the live updates is shown
//   data-ago              in a <time datetime>: how long ago that is
//   data-zone="NAME"      shows the zone of all times; data-own-zone: a hidden button that chooses that of the browser
//   data-zone-cookie="NAME" and data-root="URL" on <body>: the cookie with the zone, and the first page
//   data-badge="URL"      on the icon: the findings of the doctor, which a tab in the background reads every minute;
//                         data-plain="URL" and data-critical="URL": the icon without and with critical ones
//   data-filter           the field that / focuses; its suggestions are those of the last word
//   data-go="KEY"         a link that g and this key follow
//   data-select-all       a checkbox for all checkboxes of its table
//   data-selected         shows how many of them are selected
//   data-copy="TEXT"      a hidden button that copies this text, what data-copy-url has, or the <code> or <pre> beside it
"use strict";

(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const TYPED = "input:not([type=checkbox], [type=radio], [type=submit], [type=button], [type=hidden]), textarea, select";

  // -- times ---------------------------------------------------------------------------------------------------------

  const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

  function relative(moment) {
    const seconds = (Date.now() - moment) / 1000;
    const unit = UNITS.find(([, size]) => Math.abs(seconds) >= size);
    if (!unit) return "now";
    const text = `${Math.floor(Math.abs(seconds) / unit[1])} ${unit[0]}`;
    return seconds > 0 ? `${text} ago` : `in ${text}`;
  }

  function setText(element, text) {
    // A text that stays as it is must not be replaced: the reader may have selected it.
    if (element.textContent !== text) element.textContent = text;
  }

  function showTimes(root = document) {
    for (const element of all("time[datetime] [data-ago]", root)) {
      const moment = new Date(element.closest("time").dateTime);
      if (!Number.isNaN(moment.getTime())) setText(element, relative(moment));
    }
  }

  const ownZone = Intl.DateTimeFormat().resolvedOptions().timeZone;

  // The server writes all times, in the zone of a cookie. Until the reader has chosen one it is that of the browser.
  function rememberZone() {
    const { zoneCookie: name, root } = document.body.dataset;
    if (!name || !ownZone || document.cookie.split("; ").some((each) => each.startsWith(`${name}=`))) return false;
    const path = new URL(root, location.href).pathname.replace(/\/$/, "") || "/";
    document.cookie = `${name}=${ownZone}; path=${path}; max-age=31536000; samesite=lax`;
    return document.cookie.includes(`${name}=${ownZone}`);
  }

  function showOwnZone(root = document) {
    const shown = document.querySelector("[data-zone]");
    for (const button of all("[data-own-zone]", root)) {
      button.hidden = !ownZone || [shown?.dataset.zone, shown?.textContent, "UTC"].includes(ownZone);
      button.value = ownZone ?? "";
      button.title = "Show all times in the zone of this browser";
      setText(button, ownZone ?? "");
    }
  }

  // -- selections ----------------------------------------------------------------------------------------------------

  const boxesOf = (table) => all("tbody input[type=checkbox]", table);

  function showSelection() {
    let selected = 0;
    for (const main of all("[data-select-all]")) {
      const boxes = boxesOf(main.closest("table"));
      const checked = boxes.filter((box) => box.checked).length;
      main.checked = boxes.length > 0 && checked === boxes.length;
      main.indeterminate = checked > 0 && checked < boxes.length;
      main.hidden = false;
      selected += checked;
    }
    for (const element of all("[data-selected]")) setText(element, selected ? `${selected} selected` : "");
  }

  let lastBox = null;

  document.addEventListener("click", (event) => {
    const box = event.target.closest?.("input[type=checkbox]");
    const table = box?.closest("table");
    if (!table) return;
    const boxes = boxesOf(table);
    if (box.matches("[data-select-all]")) {
      for (const each of boxes) each.checked = box.checked;
    } else if (event.shiftKey && boxes.includes(lastBox)) {
      const [from, to] = [boxes.indexOf(lastBox), boxes.indexOf(box)].sort((a, b) => a - b);
      for (const each of boxes.slice(from, to + 1)) each.checked = box.checked;
    }
    lastBox = box;
    showSelection();
  });

  // -- copying -------------------------------------------------------------------------------------------------------

  async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    // Without TLS, and not on this machine: browsers then have the old way only.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) throw new Error("the browser does not copy");
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (!button) return;
    const text = button.dataset.copy || button.parentElement.querySelector("pre, code")?.textContent || "";
    const label = (button.dataset.label ??= button.textContent);
    try {
      const { copyUrl } = button.dataset;
      await copy(copyUrl ? await (await fetch(copyUrl, { cache: "no-store" })).text() : text);
      setText(button, "Copied");
    } catch {
      setText(button, "Not copied");
    }
    setTimeout(() => setText(button, label), 2000);
  });

  function showButtons(root = document) {
    for (const button of all("[data-copy][hidden]", root)) button.hidden = false;
  }

  // -- replacing a section -------------------------------------------------------------------------------------------

  const sectionsOf = (root) => all("[data-live][id]", root);
  // These are on each page, also on the answer to a form, whose address cannot be read again.
  const isLive = () => sectionsOf(document).some((section) => !["zone", "pauses"].includes(section.id));
  // Without the times since, which the script keeps up to date itself.
  const sentHtml = (section) => section.outerHTML.replace(/(data-ago="">)[^<]*/g, "$1");
  const received = new Map();  // the id of a section -> its HTML as the server sent it

  const nameOf = (element) => [element.tagName, element.id, element.name, element.type === "checkbox" ? element.value : ""].join("\n");
  const detailsName = (element) => element.id || element.querySelector("summary")?.textContent.trim() || "";
  const focusName = (element) => [nameOf(element), element.getAttribute("href"), element.textContent.trim()].join("\n");
  const FOCUSED = "a[href], button, input, select, textarea, summary, [tabindex]";

  // A click on what is replaced before the button is released would be lost.
  // One that is released outside the window is not reported, so it counts for some seconds at most.
  let pressed = 0;
  document.addEventListener("pointerdown", () => { pressed = Date.now(); }, true);
  for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, () => { pressed = 0; }, true);

  function isBusy(section) {
    if (Date.now() - pressed < 5000) return true;
    const active = document.activeElement;
    if (section.contains(active) && active.matches(TYPED)) return true;
    if (section.querySelector("dialog[open]")) return true;
    const selection = document.getSelection();
    return !selection.isCollapsed && selection.containsNode(section, true);
  }

  /** Replace what is in a section, and keep what the reader has done to it. */
  function replace(section, fresh) {
    const boxes = new Map(all("input[type=checkbox], input[type=radio]", section).map((each) => [nameOf(each), each.checked]));
    const fields = all(TYPED, section).filter((each) => "defaultValue" in each && each.value !== each.defaultValue);
    const typed = new Map(fields.map((each) => [nameOf(each), each.value]));
    const open = new Map(all("details", section).map((each) => [detailsName(each), each.open]));
    const scrolled = all("*", section).filter((each) => each.scrollLeft || each.scrollTop);
    const places = new Map(scrolled.map((each) => [`${each.tagName} ${each.className}`, [each.scrollLeft, each.scrollTop]]));
    const active = section.contains(document.activeElement) ? document.activeElement : null;
    const focused = active && focusName(active);
    const order = active && all(FOCUSED, section).indexOf(active);
    const [left, top] = [window.scrollX, window.scrollY];

    for (const { name } of [...section.attributes]) if (!fresh.hasAttribute(name)) section.removeAttribute(name);
    for (const { name, value } of fresh.attributes) section.setAttribute(name, value);
    section.replaceChildren(...fresh.childNodes);

    for (const each of all("input[type=checkbox], input[type=radio]", section)) {
      if (boxes.has(nameOf(each))) each.checked = boxes.get(nameOf(each));
    }
    for (const each of all(TYPED, section)) if (typed.has(nameOf(each))) each.value = typed.get(nameOf(each));
    for (const each of all("details", section)) if (open.has(detailsName(each))) each.open = open.get(detailsName(each));
    for (const each of places.size ? all("*", section) : []) {
      const place = places.get(`${each.tagName} ${each.className}`);
      if (place) [each.scrollLeft, each.scrollTop] = place;
    }
    if (active) {
      const others = all(FOCUSED, section);
      // What had the focus may be gone, as a job that has ended: then what is in its place has it.
      const next = others.find((each) => focusName(each) === focused) ?? others[Math.min(order, others.length - 1)];
      (next ?? section).focus({ preventScroll: true });
    }
    window.scrollTo({ left, top, behavior: "instant" });
    showTimes(section);
    showOwnZone(section);
    showButtons(section);
  }

  // -- fetching the page again ---------------------------------------------------------------------------------------

  const SHORTEST = 1000;  // milliseconds between two requests
  // Answers after which asking again is of no use: 0 is a redirect, as to the login page of the application.
  const LAST = new Map([[0, "signedOut"], [401, "signedOut"], [403, "signedOut"], [404, "gone"], [410, "gone"]]);
  const SHARE = 4;  // a page that takes long is fetched less often: of the time, at most one part in so many and one

  let isFetching = false, isWanted = false, notBefore = 0, timer = 0;
  let fetching = new AbortController();

  function refresh() {
    isWanted = true;
    if (isFetching || timer || document.hidden || isPaused) return;
    timer = setTimeout(fetchPage, Math.max(0, notBefore - Date.now()));
  }

  async function fetchPage() {
    timer = 0;
    [isFetching, isWanted] = [true, false];
    const began = Date.now();
    try {
      const response = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "manual", cache: "no-store", signal: fetching.signal });
      if (LAST.has(response.status)) return stop(LAST.get(response.status));
      if (!response.ok) throw new Error(`status ${response.status}`);
      show(new DOMParser().parseFromString(await response.text(), "text/html"));
      failures = 0;
      setState(isPaused ? "paused" : "live");
    } catch (error) {
      if (error.name !== "AbortError" && stream) reconnect();
    } finally {
      isFetching = false;
      notBefore = Math.max(began + SHORTEST, Date.now() + SHARE * (Date.now() - began));
      if (isWanted) refresh();
    }
  }

  function show(page) {
    const number = /^\((\d+)\) /.exec(page.title);
    showBadge(number ? Number(number[1]) : 0);
    for (const section of sectionsOf(document)) {
      const fresh = page.getElementById(section.id);
      if (!fresh) continue;
      const html = sentHtml(fresh);
      if (received.get(section.id) === html) continue;
      if (isBusy(section)) continue;  // until the next event
      received.set(section.id, html);
      replace(section, document.importNode(fresh, true));
    }
    showTimes();
    showSelection();
  }

  // -- the badge: how many findings are critical, on the tab ---------------------------------------------------------

  const BADGE_EVERY = 60000;
  const icon = document.querySelector("link[data-badge]");

  function showBadge(number) {
    if (!icon) return;
    document.title = (number ? `(${number}) ` : "") + document.title.replace(/^\(\d+\) /, "");
    icon.setAttribute("href", number ? icon.dataset.critical : icon.dataset.plain);
  }

  // A tab in the background reads its page no more, and is where somebody sees a badge.
  async function readBadge() {
    if (!document.hidden || isPaused) return;
    try {
      const response = await fetch(icon.dataset.badge, { redirect: "manual", cache: "no-store" });
      if (!response.ok) return;
      const { findings } = await response.json();
      showBadge(findings.filter((each) => each.severity === "critical").length);
    } catch {
      // The database or the server does not answer: the next minute tells.
    }
  }

  if (icon) setInterval(readBadge, BADGE_EVERY);

  // -- events --------------------------------------------------------------------------------------------------------

  const TEXTS = {
    connecting: "Connecting", live: "Live", lost: "Reconnecting", paused: "Paused", signedOut: "No access: sign in again", gone: "No longer there",
  };
  const FIRST_DELAY = 1000, LONGEST_DELAY = 60000;

  let stream = null, failures = 0, reconnecting = 0, isPaused = false;
  const url = document.body.dataset.events;
  const status = document.getElementById("live-status");
  const toggle = document.createElement("button");

  function setState(state) {
    if (!status) return;
    status.dataset.state = state;
    setText(status, TEXTS[state]);
    toggle.setAttribute("aria-label", isPaused ? "Resume live updates" : "Pause live updates");
    toggle.title = toggle.getAttribute("aria-label");
    setText(toggle, isPaused ? "Resume updates" : "Pause updates");
  }

  function connect() {
    clearTimeout(reconnecting);
    reconnecting = 0;
    if (stream || isPaused || document.hidden) return;
    fetching = new AbortController();
    stream = new EventSource(url);
    stream.onopen = refresh;  // something may have changed while there was no stream
    stream.onmessage = refresh;
    stream.onerror = reconnect;
  }

  function disconnect() {
    clearTimeout(reconnecting);
    clearTimeout(timer);
    reconnecting = timer = 0;
    isWanted = false;
    stream?.close();
    stream = null;
    fetching.abort();
  }

  function reconnect() {
    // The browser's own reconnecting does not wait longer each time, and gives up after an error of the server.
    disconnect();
    if (failures > 0) setState("lost");
    const delay = Math.min(LONGEST_DELAY, FIRST_DELAY * 2 ** failures);
    failures += 1;
    reconnecting = setTimeout(connect, delay * (0.5 + Math.random() / 2));
  }

  function stop(state) {
    disconnect();
    setState(state);
  }

  function pause(wanted) {
    isPaused = wanted;
    if (wanted) {
      disconnect();
      setState("paused");
    } else {
      failures = 0;
      connect();
      setState("lost");
    }
  }

  function startLive() {
    if (!url || !isLive()) return;
    for (const section of sectionsOf(document)) received.set(section.id, sentHtml(section));
    toggle.type = "button";
    toggle.className = "button button--quiet";
    toggle.addEventListener("click", () => pause(!isPaused));
    status?.after(toggle);
    setState("connecting");
    document.addEventListener("visibilitychange", () => {
      if (isPaused) return;
      if (document.hidden) {
        disconnect();
        setState("paused");
      } else {
        failures = 0;
        connect();
      }
    });
    // A page that is kept for the button "Back" must not keep its connection.
    window.addEventListener("pagehide", disconnect);
    window.addEventListener("pageshow", (event) => event.persisted && connect());
    connect();
  }

  // -- suggestions ---------------------------------------------------------------------------------------------------

  // A browser compares each suggestion with the whole line; the script puts the words before the last one in front.
  document.addEventListener("input", (event) => {
    const list = event.target.matches?.("[data-filter]") && event.target.list;
    if (!list) return;
    const before = event.target.value.replace(/\S*$/, "");
    for (const option of list.options) {
      option.dataset.word ??= option.value;
      option.value = before + option.dataset.word;
    }
  });

  // -- keys ----------------------------------------------------------------------------------------------------------

  const KEYS = [
    ["j", "Next row"], ["k", "Previous row"], ["Enter", "Open the row"], ["x", "Select the row"], ["/", "Search"],
    ["g o", "Overview"], ["g j", "Jobs of the queue"], ["g w", "Consumers"], ["g f", "Failures"], ["g s", "Schedules"], ["g h", "Health"],
    ...(document.querySelector('a[data-go="a"]') ? [["g a", "Audit"]] : []), ["g /", "Search all queues"], ["p", "Pause or resume live updates"],
    ["?", "Show these keys"],
  ];
  let isGoing = 0;

  const linkOf = (row) => row.querySelector("a[href]") ?? row.querySelector("input[type=checkbox]");

  function move(step) {
    const rows = all("main tbody tr").filter(linkOf);
    if (!rows.length) return;
    const now = rows.findIndex((row) => row.contains(document.activeElement));
    const next = rows[now < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(Math.max(now + step, 0), rows.length - 1)];
    linkOf(next).focus();
    next.scrollIntoView({ block: "nearest" });
  }

  function showKeys() {
    let dialog = document.getElementById("keys");
    if (!dialog) {
      dialog = document.createElement("dialog");
      dialog.id = "keys";
      dialog.setAttribute("aria-labelledby", "keys-title");
      const title = document.createElement("h2");
      title.id = "keys-title";
      title.textContent = "Keyboard";
      const list = document.createElement("dl");
      for (const [keys, meaning] of KEYS) {
        const term = document.createElement("dt");
        for (const key of keys.split(" ")) term.append(Object.assign(document.createElement("kbd"), { textContent: key }), " ");
        list.append(term, Object.assign(document.createElement("dd"), { textContent: meaning }));
      }
      const form = document.createElement("form");
      form.method = "dialog";
      form.append(Object.assign(document.createElement("button"), { textContent: "Close" }));
      dialog.append(title, list, form);
      document.body.append(dialog);
    }
    if (!dialog.open) dialog.showModal();
  }

  const ACTIONS = {
    j: () => move(1),
    k: () => move(-1),
    x: () => document.activeElement?.closest("tr")?.querySelector("input[type=checkbox]")?.click(),
    "/": () => document.querySelector("[data-filter], main input[type=search]")?.focus(),
    p: () => stream || reconnecting || isPaused ? pause(!isPaused) : undefined,
    "?": showKeys,
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.defaultPrevented) return;
    const target = event.target;
    if (target.isContentEditable || target.matches?.(TYPED)) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (document.querySelector("dialog[open]")) return;
    const wasGoing = Date.now() - isGoing < 1500;
    isGoing = event.key === "g" ? Date.now() : 0;
    const link = wasGoing && all("a[data-go]").find((each) => each.dataset.go === event.key);
    const action = link ? () => link.click() : wasGoing || !Object.hasOwn(ACTIONS, event.key) ? null : ACTIONS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });

  // A double click sends a form once; later it may be sent again, as from a page that the reader went back to.
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.method !== "post" || event.defaultPrevented) return;
    if (Date.now() - (form.sentAt ?? 0) < 2000) event.preventDefault();
    else form.sentAt = Date.now();
  });

  startLive();
  if (rememberZone() && isLive()) refresh();
  showTimes();
  showOwnZone();
  showButtons();
  showSelection();
  setInterval(showTimes, 15000);
})();
