// The colours of the style sheet, as the canvas needs them.

/** What a custom property is now; read through an element, because the browser resolves light and dark only there. */
function colourOf(property) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${property})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Dark or light letters, whichever can be read on a colour (relative luminance as in WCAG 2.2). */
function lettersOn(colour) {
  const [red, green, blue] = colour.match(/[\d.]+/g).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff"; // either is 4.5:1 there
}

/** Stripes of a colour: time in which nothing is done. */
function stripes(context, colour) {
  const size = 6, tile = new OffscreenCanvas(size, size), pen = tile.getContext("2d");
  pen.fillStyle = colour;
  pen.globalAlpha = 0.22;
  pen.fillRect(0, 0, size, size);
  pen.globalAlpha = 0.85;
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

function readColours(context, families) {
  const fills = families.map((family) => colourOf(family.key));
  const call = colourOf("call");
  return {
    fills,
    letters: fills.map(lettersOn),
    waiting: stripes(context, colourOf("communication")),
    call,
    callLetters: lettersOn(call),
    blocked: stripes(context, call),
    ...Object.fromEntries(["ink", "muted", "faint", "panel", "hover", "focus", "path"].map((name) => [name, colourOf(name)])),
  };
}
