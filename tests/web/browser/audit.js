// What a page owes to everybody, found by looking at the rendered page: returns a list of sentences, empty if all is well.
() => {
  const problems = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const isShown = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const describe = (element) => `${element.outerHTML.replace(/\s+/g, " ").slice(0, 120)}`;
  const nameOf = (element) =>
    element.getAttribute("aria-label") ||
    (element.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join(" ").trim() ||
    [...(element.labels ?? [])].map((label) => label.textContent).join(" ").trim();

  if (document.documentElement.lang !== "en") problems.push("the page has no language");
  if (!document.title.trim()) problems.push("the page has no title");
  if (all("main").length !== 1) problems.push("the page has not one <main>");

  // Headings: one of the first level, and no level is left out.
  const levels = all("h1, h2, h3, h4, h5, h6").filter(isShown).map((each) => Number(each.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1) problems.push(`headings of level 1: ${levels}`);
  levels.forEach((level, index) => index && level > levels[index - 1] + 1 && problems.push(`a heading leaves out a level: ${levels}`));

  // Names: of fields, buttons, links, tables and regions.
  for (const field of all("input:not([type=hidden]), select, textarea").filter(isShown)) {
    if (!nameOf(field)) problems.push(`a field without a label: ${describe(field)}`);
  }
  for (const each of all("a[href], button, summary").filter(isShown)) {
    if (!(nameOf(each) || each.textContent.trim() || each.querySelector("[aria-label], title"))) problems.push(`no name: ${describe(each)}`);
  }
  for (const each of all("svg, img").filter(isShown)) {
    const hidden = each.closest("[aria-hidden=true]");
    if (!hidden && !(nameOf(each) || each.getAttribute("alt") || each.querySelector("title"))) problems.push(`no text: ${describe(each)}`);
  }
  for (const each of all("th")) if (!each.hasAttribute("scope")) problems.push(`no scope: ${describe(each)}`);
  for (const each of all("[aria-labelledby], [aria-describedby], [aria-controls], label[for]")) {
    const ids = [each.getAttribute("aria-labelledby"), each.getAttribute("aria-describedby"), each.getAttribute("aria-controls"), each.getAttribute("for")];
    for (const id of ids.filter(Boolean).join(" ").split(" ")) if (!document.getElementById(id)) problems.push(`no element ${id}: ${describe(each)}`);
  }
  const ids = all("[id]").map((each) => each.id);
  for (const id of new Set(ids)) if (ids.filter((each) => each === id).length > 1) problems.push(`several elements ${id}`);
  for (const each of all("[data-live]")) if (!each.id) problems.push(`a live section without an id: ${describe(each)}`);
  for (const each of all("form")) if (each.querySelector("form")) problems.push(`a form in a form: ${describe(each)}`);

  // No code or style in the page itself.
  for (const each of all("[style], script:not([src]), style")) problems.push(`inline: ${describe(each)}`);
  for (const each of all("*")) for (const { name } of each.attributes) if (name.startsWith("on")) problems.push(`handler: ${describe(each)}`);

  // The page itself does not scroll sideways; wide tables do so in their own boxes.
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) {
    const wide = all("body *").filter((each) => isShown(each) && each.getBoundingClientRect().right > width + 1 && !each.closest(".scroll, .chart, pre, nav, table"));
    problems.push(`wider than the window (${document.documentElement.scrollWidth} > ${width}): ${wide.slice(0, 3).map(describe).join(" | ")}`);
  }

  // Contrast: 4.5 for text, 3 for large text.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((each) => each / 255);
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((each, index) => each * a + under[index] * (1 - a));
  const background = (element) => {
    const colors = [];
    for (let each = element; each; each = each.parentElement) colors.push(rgba(getComputedStyle(each).backgroundColor));
    const canvasColor = matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0] : [1, 1, 1];
    return colors.reverse().reduce((under, color) => over(color, under), canvasColor);
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const seen = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !isShown(element) || element.closest("[aria-disabled=true], :disabled, .visually-hidden, svg, script, option")) continue;
    const style = getComputedStyle(element);
    const under = background(element);
    const front = over(rgba(style.color), under);
    const [light, dark] = [luminance(front), luminance(under)].sort((a, b) => b - a);
    const contrast = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const wanted = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const key = `${element.tagName}.${element.className} ${contrast.toFixed(2)}`;
    if (contrast < wanted && !seen.has(key)) problems.push(`contrast ${contrast.toFixed(2)}: ${describe(element)}`);
    seen.add(key);
  }
  return problems;
}
